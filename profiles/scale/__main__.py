"""What bounds a large job: python -m profiles.scale [driver listings requests turns ...] [--out FOLDER]

driver     CPU time of the trainer's process a batch, by executor and bytes of a batch
listings   listing, index, order: time and memory by the number of samples
requests   requests to a store, at the start and a sample, counted before SeaweedFS
turns      what delivery in order costs where times vary, simulated with measured times of samples

Parts that are not named keep what the newest file in profiles/results says. docs/scale.md is written from it, too, with
`--render` without measuring.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loaderkit._internal.system.cgroups import num_cpus
from profiles.scale import driver, listings, requests, turns
from profiles.scale.page import PAGE, RESULTS, filled, newest

PARTS: dict[str, Callable[[], Any]] = {
    "driver": driver.measure,
    "listings": listings.measure,
    "requests": requests.measure,
    "turns": turns.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    if not args.render:
        known: dict[str, Any] = dict(newest()) if any(RESULTS.glob("scale-*.json")) else {}
        for name, measure in PARTS.items():
            if not args.parts or name in args.parts:
                known[name] = measure()
        write(args.out, known)
    PAGE.write_text(filled(PAGE.read_text()))


def write(out: Path, known: dict[str, Any]) -> None:
    """One file of this day in the place of those before it."""
    path = out / f"scale-{num_cpus()}cpu-{datetime.now(UTC).date().isoformat()}.json"
    facts = {
        "file": path.name, "cpus": num_cpus(), "machine": platform.machine(), "python": platform.python_version(),
        "sample_bytes": requests.SAMPLE_BYTES,
    }  # fmt: skip
    for earlier in out.glob("scale-*.json"):
        earlier.unlink()
    path.write_text(json.dumps({**known, **facts}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
