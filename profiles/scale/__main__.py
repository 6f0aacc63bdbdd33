"""What bounds a large job: python -m profiles.scale [driver listings requests turns ...] [--out FOLDER]

driver     CPU time of the trainer's process a batch, by executor and bytes of a batch
listings   listing, index, order: time and memory by the number of samples
requests   requests to a store, at the start and a sample, counted before SeaweedFS
turns      what delivery in order costs where times vary, simulated with measured times of samples

Parts that are not named keep what the newest file in FOLDER says (default: profiles/results), which has to be of the same
machine. docs/scale.md is written from it, too, with `--render` without measuring; for another FOLDER there.
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
    facts = {"cpus": num_cpus(), "machine": platform.machine(), "python": platform.python_version()}
    if not args.render:
        known: dict[str, Any] = dict(newest(args.out)) if args.parts else {}
        if other := [f"{key} {known[key]}" for key, value in facts.items() if known.get(key, value) != value]:
            parser.error(f"the other parts were measured with {', '.join(other)}: measure all of them here")
        for name, measure in PARTS.items():
            if not args.parts or name in args.parts:
                known[name] = measure()
        write(args.out, {**known, **facts})
    page = PAGE if args.out == RESULTS else args.out / PAGE.name
    page.write_text(filled(PAGE.read_text(), newest(args.out)))


def write(out: Path, known: dict[str, Any]) -> None:
    """One file of this day in the place of those before it."""
    path = out / f"scale-{num_cpus()}cpu-{datetime.now(UTC).date().isoformat()}.json"
    out.mkdir(parents=True, exist_ok=True)
    for earlier in out.glob("scale-*.json"):
        earlier.unlink()
    found = {**known, "file": path.name, "sample_bytes": requests.SAMPLE_BYTES}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
