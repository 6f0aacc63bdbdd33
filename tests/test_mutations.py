"""Damaged files of every kind are read or refused by name, and nothing else: no other exception, no crash, no hang, no bomb of
memory, nothing left running. A failure says by which command it is had again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NUM_KINDS = 47
MOST_AT_ONCE = 4000


def command(seed: int, first: int, last: int, *more: str) -> list[str]:
    return [sys.executable, "tests/helpers/mutants.py", "--seed", str(seed), "--numbers", str(first), str(last), *more]


def again(seed: int, number: int) -> str:
    return f"\nagain: PYTHONPATH=. {' '.join(command(seed, number, number + 1, '--debug'))}"


def outcomes(folder: Path, seed: int, first: int, last: int) -> dict[str, int]:
    """How often each kind of file was read or refused; fails with what else happened."""
    at = folder / "at"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
    ran = subprocess.run(
        command(seed, first, last, "--at", str(at)), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if ran.returncode:
        number, kind = at.read_text().split() if at.exists() else (first, "the valid files")
        pytest.fail(f"{kind}: ended with {ran.returncode}{again(seed, int(number))}\n{ran.stderr[-6000:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    failures = [f"{one['kind']}: {one['what'][-3000:]}{again(seed, one['number'])}" for one in found["failures"]]
    if failures:
        pytest.fail("\n\n".join([f"{len(failures)} failures", *failures[:5]]))
    counts: dict[str, int] = found["outcomes"]
    return counts


def check(folder: Path, num: int, seed: int) -> None:
    counts: dict[str, int] = {}
    for first in range(0, num, MOST_AT_ONCE):
        for name, count in outcomes(folder, seed, first, min(first + MOST_AT_ONCE, num)).items():
            counts[name] = counts.get(name, 0) + count
    kinds = {name.split()[0] for name in counts}
    assert sum(counts.values()) == num
    assert len(kinds) == NUM_KINDS
    # Damage is damage, and not always: what is read as if nothing were is looked through as well.
    assert {f"{kind} refused" for kind in kinds - {"idx", "offsets"}} <= counts.keys()


def test_a_sample(tmp_path: Path, rng: random.Random) -> None:
    check(tmp_path, 300, rng.randrange(2**32))


@pytest.mark.prove
def test_all(tmp_path: Path, rng: random.Random) -> None:
    check(tmp_path, 20_000, rng.randrange(2**32))
