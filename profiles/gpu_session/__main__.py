"""Everything of loaderkit that needs a GPU, in one command.

    python -m profiles.gpu_session [--part a|b] [--tiny] [--only STEP[,STEP]] [--out DIR]

Part a needs no DALI and takes six minutes at most, part b four. Each step is a process with a limit; its figures are a line of
DIR/gpu.jsonl as soon as it has ended, and DIR/gpu.md is a page of all of them. DIR is $OUT, or build/gpu. `--tiny` rehearses:
little data, and without a GPU every step runs on the CPU or says that it is skipped. docs/gpu.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiles.gpu_session.page import page
from profiles.gpu_session.session import Place, run_steps
from profiles.gpu_session.steps import BUDGET_S, STEPS, UNPACK, UNPACK_DALI, Step

_MEMORY = Path("/dev/shm")
_REHEARSED = 4.0  # a rehearsal may be on a small and busy machine


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiles.gpu_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=sorted(BUDGET_S))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="STEP[,STEP]")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "build/gpu"))
    parser.add_argument("--bundle", type=Path, help="what `make gpu-bundle` has made, to be unpacked first")
    parser.add_argument("--seconds", type=float, help="for a part, in the place of what it has")
    for name in ("misbehave", "limit"):  # of tests: STEP=crash, STEP=seconds
        parser.add_argument(f"--{name}", action="append", default=[], help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    names = [step.name for step in STEPS]
    if unknown := [name for name in found.only or () if name not in names]:
        parser.error(f"--only: there is no step {unknown[0]!r}; there are {', '.join(names)}")
    return found


def _is_asked(step: Step, given: argparse.Namespace) -> bool:
    if step.name in (UNPACK, UNPACK_DALI):
        return given.bundle is not None
    return given.only is None or step.name in given.only


def _limited(step: Step, limits: Mapping[str, str], factor: float) -> Step:
    return replace(step, limit_s=float(limits.get(step.name, factor * step.limit_s)))


def _say(line: dict[str, Any]) -> None:
    missed = [bar["name"] for bar in line.get("bars", ()) if not bar["met"]]
    why = line.get("skipped") or line.get("why")
    print(
        f"{line['part']} {line['name']:<10} {line['outcome']}{f': {why}' if why else ''}, {line.get('seconds', 0)} s"
        + (f"; bars not met: {', '.join(missed)}" if missed else ""),
        json.dumps(line.get("figures", {})),
        flush=True,
    )


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 if a step has failed, 2 if one found no time."""
    given = parse(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    misbehaving, limits = (dict(pair.split("=") for pair in pairs) for pairs in (given.misbehave, given.limit))
    lines: list[dict[str, Any]] = []
    work = Path(tempfile.mkdtemp(prefix="loaderkit-gpu-"))
    fast = Path(tempfile.mkdtemp(prefix="loaderkit-gpu-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else work))
    place, site = Place(given.out, work, fast), work / "site"
    if given.bundle is not None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])

    def command(step: Step, limit_s: float) -> list[str]:
        if step.name in (UNPACK, UNPACK_DALI):
            return [sys.executable, "profiles/gpu_bundle/unpack.py", str(given.bundle), str(site)]
        own = [sys.executable, "-X", "faulthandler", "-m", "profiles.gpu_session.child", step.name]
        own += ["--work", str(work), "--fast", str(fast), "--report", str(place.report(step))]
        own += ["--until", str(time.monotonic() + limit_s)]  # of one clock for all processes
        own += ["--misbehave", misbehaving[step.name]] if step.name in misbehaving else []
        return [*own, "--tiny"] if given.tiny else own

    if given.tiny:  # threads that wait for one another by spinning take a busy machine's CPUs
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        for part, budget_s in BUDGET_S.items():
            steps = [
                step for step in STEPS if step.part == part and given.part in (None, part) and _is_asked(step, given)
            ]
            steps = [_limited(step, limits, _REHEARSED if given.tiny else 1.0) for step in steps]
            seconds = given.seconds or budget_s * (_REHEARSED if given.tiny else 1.0)
            lines += run_steps(steps, command, place, budget_s=seconds, each=_say)
    finally:
        for folder in (fast, work):
            shutil.rmtree(folder, ignore_errors=True)
        known = (given.out / "gpu.jsonl").read_text().splitlines() if (given.out / "gpu.jsonl").exists() else []
        (given.out / "gpu.md").write_text(page([json.loads(line) for line in known]))
    outcomes = {line["outcome"] for line in lines}
    return 1 if outcomes - {"passed", "skipped", "not run"} else 2 if "not run" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
