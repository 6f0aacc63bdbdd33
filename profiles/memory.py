"""Whether memory stays flat: a million trivial samples in long epochs, in short ones, and in epochs that are broken off.

    python -m profiles.memory [--samples 1000000] [--out profiles/results]

Counted is the resident memory of the training process and of those that load, the pages of files left out: those are
libraries, and their share depends on who else uses them. A page that two processes see counts half for each. The first
figure is taken after a tenth of the samples, when slabs and caches are there.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"executor": "inline"},
    "thread": {"executor": "thread"},
    "process": {"executor": "process"},
    "processes: 2": {"executor": "process", "processes": 2},
}
WAYS = {"long epochs": (100_000, None), "short epochs": (500, None), "broken off": (10_000, 20)}
"""way -> (samples of an epoch, batches until the loop breaks)"""
BATCH = 64
NUM_LOOKS = 10


class Trivial:
    """Items that cost nothing but their way through the loader."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index, "text": "a text"}


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of some processes, but for pages of files."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += 1024 * int(line.split()[1])
    return total


def measure(executor: str, way: str, num_samples: int) -> dict[str, Any]:
    """Let one loader deliver so many samples; memory in bytes after each tenth. To be called in a fresh interpreter."""
    import loaderkit

    size, num_taken = WAYS[way]
    loader = loaderkit.build(
        {
            "source": {"kind": "dataset", "object": "profiles.memory:Trivial", "args": {"size": size}},
            "stages": ["read", {"batch": {"size": BATCH}}],
            "prefetch": {**EXECUTORS[executor], "concurrency": 2},
        }
    )
    seen = num_epochs = 0
    looks: list[int] = []
    with loader:
        while seen < num_samples:
            num_epochs += 1
            for number, batch in enumerate(loader, 1):
                seen += len(batch["x"])
                if number == num_taken:
                    break
            if seen >= num_samples * (len(looks) + 1) / NUM_LOOKS:
                del batch
                gc.collect()
                looks.append(resident_bytes([os.getpid(), *(loader.stats().tuning.pids or ())]))
    return {"executor": executor, "way": way, "samples": seen, "epochs": num_epochs, "bytes": looks}


def run(executor: str, way: str, num_samples: int) -> dict[str, Any]:
    """`measure` in an interpreter of its own."""
    program = f"import json, profiles.memory as m; print(json.dumps(m.measure({executor!r}, {way!r}, {num_samples})))"
    command = [sys.executable, "-c", program]
    root = Path(__file__).resolve().parent.parent
    ran = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| executor | way | samples | epochs | MiB after a tenth | at the end | most |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        first, last, most = (value / 2**20 for value in (one["bytes"][0], one["bytes"][-1], max(one["bytes"])))
        lines.append(
            f"| {one['executor']} | {one['way']} | {one['samples']:,} | {one['epochs']:,} | {first:.1f} | {last:.1f} | "
            f"{most:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [run(executor, way, options.samples) for executor in EXECUTORS for way in WAYS]
    print(table(results))
    if options.out is not None:
        name = f"memory-{len(os.sched_getaffinity(0))}cpu-{datetime.date.today()}"
        said = f"`python -m profiles.memory`, batches of {BATCH}. Memory of all processes together, without pages of files."
        text = f"# Memory over many samples\n\n{said}\n\n{table(results)}\n"
        (options.out / f"{name}.md").write_text(text)
        (options.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
