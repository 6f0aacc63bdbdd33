"""What user's code forks ends where it leaves that code, however it does; its parent continues, with every executor."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import HELPERS
from executors import EXECUTORS
from forking import BATCH, CODES, FORKING, NUM_SAMPLES, PLACES, POLICIES, Case
from waiting import wait_for

_PATIENCE_S = 600.0
_FORKED = ("fork", "multiprocessing")
_ENDS = [*product(_FORKED, CODES), ("exec", "return"), ("pool", "return")]


@pytest.fixture
def group() -> Iterator[list[int]]:
    """Process groups that are ended with the test."""
    found: list[int] = []
    yield found
    for one in found:
        with suppress(ProcessLookupError):
            os.killpg(one, signal.SIGKILL)


def run(cases: list[Case], folder: Path, group: list[int]) -> tuple[list[dict[str, Any]], list[list[str]], str]:
    """What came of each case, what was noted, and what was printed to stderr, by a program in a group of its own."""
    program = [sys.executable, str(HELPERS / "forking.py"), str(folder / "log")]
    # Files, no pipes: a child that was left behind would keep those open.
    with open(folder / "given", "w+") as given, open(folder / "out", "w") as out, open(folder / "said", "w") as said:
        json.dump([vars(case) for case in cases], given)
        given.seek(0)
        ran = subprocess.Popen(program, stdin=given, stdout=out, stderr=said, start_new_session=True)
        group.append(ran.pid)
        try:
            code: int | str = ran.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = "it hangs"
    printed = (folder / "said").read_text()
    found = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    assert (code, len(found)) == (0, len(cases)), (cases[len(found) : len(found) + 1], printed)
    return found, [line.split(" ", 2) for line in (folder / "log").read_text().splitlines()], printed


def is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def check(case: Case, found: dict[str, Any], notes: list[tuple[int, str]]) -> None:
    """`notes`: processes, and what each noted."""
    whole = [list(range(first, first + BATCH)) for first in range(0, NUM_SAMPLES, BATCH)]
    is_bad = case.code != 0 and case.place != "items"  # asked for one by one, those are good
    # But for the first ones, which may be asked for before: to see what batches look like, or whether a file is NumPy's.
    calls = [(pid, int(what)) for pid, what in notes if what.isdigit() and int(what) >= BATCH]
    others = [(pid, what) for pid, what in notes if not what.isdigit()]
    replacements: set[int] = set()
    # Where several fail together they are asked for again, one by one.
    is_asked_again = case.code != 0 and case.place in ("items", "records")
    if is_bad and (case.policy == "raise" or case.place == "batch"):
        assert found["batches"] == whole[:1]
        assert "the parent's error" in found["error"]
        assert found["of"] is None if case.place == "batch" else str(FORKING) in found["of"]
    else:
        assert found["error"] is None
        if is_bad:
            batch, slot = divmod(FORKING, BATCH)
            whole[batch].pop(slot)
            if case.policy == "replace":
                replacements.add(found["batches"][batch].pop(slot))
                assert FORKING not in replacements
        assert found["batches"] == whole
        num_calls = Counter(number for _, number in calls if number not in replacements)
        assert is_asked_again or num_calls == dict.fromkeys(set(range(BATCH, NUM_SAMPLES)) - replacements, 1)
    assert {pid for pid, _ in calls} <= set(found["pids"])
    assert [what for _, what in others] == ["child"] * (case.way != "pool") * (1 + (is_bad and is_asked_again))
    assert not {pid for pid, _ in others} & set(found["pids"])


def cases_of(drawn: list[tuple[str, str, str, str]], rng: random.Random) -> list[Case]:
    """Executor, policy, way and end of each are given, the place that forks is drawn."""
    return [
        Case(number, executor, policy, rng.choice(PLACES), way, end)
        for number, (executor, policy, way, end) in enumerate(drawn)
    ]


def check_all(cases: list[Case], folder: Path, group: list[int]) -> None:
    found, lines, printed = run(cases, folder, group)
    wait_for(lambda: is_gone(group[0]))
    for case, one in zip(cases, found, strict=True):
        try:
            check(case, one, [(int(pid), what) for number, pid, what in lines if int(number) == case.number])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    assert [(int(pid), what) for number, pid, what in lines if number == "-1"] == [(group[0], "atexit")]
    for end, words in (("raise", "ValueError: the child's error\n"), ("exit text", "the child's last words\n")):
        ended = [one for one in cases if one.end == end and one.way in _FORKED]
        assert printed.count(words) == len(ended) + sum(one.place == "records" for one in ended)


@pytest.mark.forked_workers
class TestForks:
    def test_some(self, rng: random.Random, tmp_path: Path, group: list[int]) -> None:
        """Threads see more ends than processes, which take seconds to start."""
        num_ends = {"inline": 2, "thread": 2, rng.choice(["process", "two processes"]): 1}
        drawn = [(one, rng.choice(POLICIES), *end) for one, num in num_ends.items() for end in rng.sample(_ENDS, num)]
        check_all(cases_of(drawn, rng), tmp_path, group)

    @pytest.mark.prove
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_all(self, executor: str, rng: random.Random, tmp_path: Path, group: list[int]) -> None:
        drawn = [(executor, policy, *end) for policy in POLICIES for end in _ENDS]
        check_all(cases_of(drawn, rng), tmp_path, group)

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_a_child_that_lives_on_is_not_waited_for(self, executor: str, tmp_path: Path, group: list[int]) -> None:
        """It has copies of all sockets of its parent's."""
        case = Case(0, executor, "raise", "call", "live on")
        found, lines, _ = run([case], tmp_path, group)
        check(case, found[0], [(int(pid), what) for number, pid, what in lines if number == "0"])
        (child,) = [int(pid) for _, pid, what in lines if what == "child"]
        os.kill(child, 0)  # it is there
