"""The session on a machine with a GPU: whatever one step does, the lines of the others are whole; rehearsed without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from profiles.gpu_session.context import Report
from profiles.gpu_session.loading import account, merged, own_account, shared_time
from profiles.gpu_session.marked_tests import WITH_DALI, WITHOUT_DALI, outcomes_in
from profiles.gpu_session.page import page
from profiles.gpu_session.rebuilds import growth
from profiles.gpu_session.session import Place, run_steps
from profiles.gpu_session.steps import BUDGET_S, STEPS, Step
from profiles.gpu_session.tell_failures import failures_in

ROOT = Path(__file__).parents[1]
FIGURES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'figures': {'n': 1}, 'bars': []}));"
PROGRAMS = {
    "good": FIGURES,
    "crash": FIGURES + "import os; os.kill(os.getpid(), 11)",
    "hang": FIGURES + "import time; print('before', file=sys.stderr, flush=True); time.sleep(1000)",
    "exit": FIGURES + "sys.exit('x' * 5000)",
    "skip": "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'skipped': 'no CUDA device'}))",
    "orphan": FIGURES + "import subprocess; subprocess.Popen(['sleep', '1000']); print('begun', flush=True)",
}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folders = [tmp_path / name for name in ("out", "work", "fast")]
    for folder in folders:
        folder.mkdir()
    return Place(*folders)


def steps(*names: str, limit_s: float = 60.0) -> list[Step]:
    return [Step(name=f"{number}-{name}", part="a", limit_s=limit_s, function="") for number, name in enumerate(names)]


def command(place: Place) -> Callable[[Step, float], list[str]]:
    return lambda step, limit_s: [sys.executable, "-c", PROGRAMS[step.name.split("-")[1]], str(place.report(step))]


def lines(place: Place) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place.out / "gpu.jsonl").read_text().splitlines()]


def test_a_step_that_crashes_hangs_or_exits_leaves_the_lines_of_the_others(place: Place) -> None:
    asked = steps("good", "crash", "exit", "skip", "good")
    asked[4:4] = steps("hang", limit_s=4.0)
    found = run_steps(asked, command(place), place, budget_s=1000)
    assert lines(place) == found
    outcomes = [line["outcome"] for line in found]
    assert outcomes == ["passed", "crashed (SIGSEGV)", "failed", "skipped", "timed out", "passed"]
    assert [line["rc"] for line in found] == [0, -11, 1, 0, -9, 0]
    assert [line.get("figures") for line in found] == [{"n": 1}] * 3 + [None] + [{"n": 1}] * 2
    assert found[2]["stderr"].strip("\n") == "x" * 2999
    assert "before" in found[4]["stderr"]
    assert "===== 4-good: rc 0" in (place.out / "gpu.log").read_text()


def test_a_line_is_on_the_disk_before_the_next_step_begins(place: Place) -> None:
    seen: list[int] = []

    def counted(step: Step, limit_s: float) -> list[str]:
        seen.append(len(lines(place)) if (place.out / "gpu.jsonl").exists() else 0)
        return command(place)(step, limit_s)

    run_steps(steps("good", "crash", "good"), counted, place, budget_s=1000)
    assert seen == [0, 1, 2]


def test_what_finds_no_time_is_not_run_and_the_last_step_gets_what_is_left(place: Place) -> None:
    times = iter([0.0, 0.0, 41.0, 93.0])
    found = run_steps(steps("good", "good", "good"), command(place), place, budget_s=100, clock=lambda: next(times))
    assert [line["outcome"] for line in found] == ["passed", "passed", "not run"]
    assert [line.get("limit_s") for line in found] == [60.0, 59.0, None]
    assert found[2] == {"name": "2-good", "part": "a", "outcome": "not run", "why": "no time"}
    assert lines(place) == found


def test_what_a_step_has_left_running_or_in_memory_is_gone(place: Place) -> None:
    (place.fast / "left").mkdir()
    (place.fast / "left" / "large").write_bytes(b"1")
    before = sleepers()
    (line,) = run_steps(steps("orphan"), command(place), place, budget_s=1000)
    assert (line["outcome"], line["stderr"]) == ("passed", "begun\n")
    wait_for(lambda: sleepers() <= before)  # what is killed takes a while to end
    assert not list(place.fast.iterdir())


def sleepers() -> set[str]:
    """Processes that sleep for 1,000 s, without those that only wait to be asked how they ended."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes() == b"sleep\x001000\x00":
                found.add(path.name)
        except OSError:
            continue
    return found


def test_limits_leave_every_step_its_time() -> None:
    for part, budget_s in BUDGET_S.items():
        assert sum(step.limit_s for step in STEPS if step.part == part) < budget_s
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_the_files_of_tests_marked_gpu_are_all_named() -> None:
    with_marks = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert with_marks == {name.partition("::")[0] for name in (*WITHOUT_DALI, *WITH_DALI)}


def test_outcomes_of_tests() -> None:
    said = """
tests/a/test_b.py::test_c[x y] PASSED                                    [ 5%]
tests/a/test_b.py::test_d SKIPPED (needs a CUDA device)                  [10%]
[gw1] [ 15%] FAILED tests/a/test_b.py::TestE::test_f
tests/a/test_b.py::test_g
FAILED tests/a/test_b.py::TestE::test_f - assert False
"""
    assert outcomes_in(said) == {
        "tests/a/test_b.py::test_c[x y]": "passed",
        "tests/a/test_b.py::test_d": "skipped",
        "tests/a/test_b.py::TestE::test_f": "failed",
    }


def test_why_a_test_failed_is_known_from_a_run_that_was_ended(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import os\n\n\ndef test_first():\n    assert 1 == 2, 'the reason'\n\n\ndef test_last():\n    os._exit(1)\n"
    )
    arguments = ["-m", "pytest", "-p", "profiles.gpu_session.tell_failures", "-p", "no:xdist", "-v", "--tb=short"]
    run = subprocess.run(
        [sys.executable, *arguments, "-c", os.devnull, "--rootdir", str(tmp_path), "test_two.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    (text,) = failures_in(run.stdout).values()
    assert "the reason" in text


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([376.0] * 5 + [524.0] * 15, (0.0, 0)),
        ([192.0] * 17 + [256.0] * 3, (64.0, 1)),
        ([962.0, 987, 960, 975, 958, 990, 961, 986], (3.0, 0)),
        ([1405.0, 1682, 1805, 1909, 2021, 2259, 2360, 2382, 2479], (570.0, 5)),
        ([100.0 + 10 * number for number in range(20)], (100.0, 10)),
    ],
    ids=["a step early on", "a step", "up and down", "grows", "a little each time"],
)
def test_memory_that_grows(values: list[float], found: tuple[float, int]) -> None:
    assert growth(values) == found


def test_a_report_is_on_the_disk_after_every_figure(tmp_path: Path) -> None:
    report = Report(tmp_path / "x.json")
    report.add(share=0.123456, name="text")
    report.bar("overlap", 0.96, least=0.95)
    assert json.loads(report.path.read_text()) == {
        "figures": {"share": 0.1235, "name": "text", "overlap": 0.96},
        "bars": [{"name": "overlap", "value": 0.96, "least": 0.95, "met": True}],
    }
    report.bar("pause", 1.2, most=1.1)
    assert [bar["met"] for bar in report.bars] == [True, False]


def test_copies_and_the_kernels_beside_them_are_read_from_a_trace(tmp_path: Path) -> None:
    def event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.0, 1e6, bytes=2**24),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 2e6, 1e6, bytes=2**20),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4e6, 1e6, bytes=8),  # labels
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5e6, 1e6, bytes=2**24),
        event("kernel", "mm", -1e6, 1.5e6),
        event("kernel", "mm", 0.25e6, 0.5e6),
        event("kernel", "mm", 2.9e6, 1e6),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    assert account(tmp_path / "trace.json") == {
        "num_copies": 2.0,
        "num_pageable": 1.0,
        "copied_bytes": float(2**24 + 2**20),
        "copies_s": 2.0,
        "beside_kernels_s": pytest.approx(0.75 + 0.1),
    }


def test_shared_time() -> None:
    assert merged([(4, 5), (0, 2), (1, 3)]) == [(0, 3), (4, 5)]
    assert shared_time([(0, 10), (20, 30)], [(5, 6), (9, 21), (29, 40)]) == 1 + 1 + 1 + 1
    assert shared_time([(0, 1)], []) == 0


def test_the_page_shows_the_last_line_of_each_step_and_what_a_failed_one_said() -> None:
    first = {"name": "facts", "part": "a", "outcome": "failed", "rc": 1, "seconds": 1.0, "stderr": "gone"}
    bar = {"name": "overlap", "value": 0.9, "least": 0.95, "met": False}
    text = page(
        [
            first,
            {**first, "outcome": "passed", "figures": {"device": "NVIDIA H100"}, "stderr": ""},
            {"name": "loader", "part": "a", "outcome": "failed", "bars": [bar], "stderr": "its last words"},
            {"name": "soak", "part": "b", "outcome": "not run", "why": "no time"},
        ]
    )
    assert text.startswith("# A session on NVIDIA H100\n")
    assert "gone" not in text
    assert "its last words" in text
    assert "| loader | overlap | 0.9 | at least 0.95 | **not met** |" in text
    assert "| soak | not run: no time |" in text


def session(
    out: Path, *arguments: str, timeout_s: float
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """The finished program, and its lines by now."""
    own = [sys.executable, "-m", "profiles.gpu_session", "--tiny", *arguments]
    environ = os.environ | {"OUT": str(out), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        own, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s, start_new_session=True
    )
    return done, [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


def test_the_real_steps_misbehave(tmp_path: Path) -> None:
    """One whole session of four steps, of which three are made to do the worst that they can."""
    misbehaving = ["loader=crash", "restore=hang", "save=exit"]
    limits = ["copies=900", "loader=900", "restore=8", "save=900"]  # those of the others are no part of the test
    flags = [f"--misbehave={one}" for one in misbehaving] + [f"--limit={one}" for one in limits]
    done, found = session(tmp_path, "--only", "copies,loader,restore,save", "--seconds", "3000", *flags, timeout_s=3000)
    assert [line["name"] for line in found] == ["copies", "loader", "restore", "save"]
    outcomes = [line["outcome"] for line in found]
    assert outcomes[0] in ("passed", "skipped"), found[0]
    assert outcomes[1:] == ["crashed (SIGSEGV)", "timed out", "failed"]
    assert "Fatal Python error: Segmentation fault" in found[1]["stderr"]
    assert "misbehave" in found[2]["stderr"], "where it hangs is not told"
    assert done.returncode == 1
    assert "timed out" in (tmp_path / "gpu.md").read_text()


def test_a_step_there_is_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "profiles.gpu_session", "--only", "nonsense"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "there is no step 'nonsense'; there are unpack, facts" in done.stderr


@pytest.mark.prove
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    """Every step passes, or is skipped for what this machine lacks."""
    done, found = session(tmp_path, timeout_s=600)
    assert {line["outcome"] for line in found} <= {"passed", "skipped"}, done.stdout
    assert [line["name"] for line in found] == [step.name for step in STEPS if step.function]
    assert all("no" in line["skipped"] for line in found if line["outcome"] == "skipped")
    assert done.returncode == 0


def test_copies_that_were_not_timed_have_no_bar(tmp_path: Path) -> None:
    """Their rate is not nothing, but not known."""
    report = Report(tmp_path / "report.json")
    own_account(report, "thread", {"num_bytes": 10, "timed_bytes": 0, "copy_s": 0.0, "exposed_s": 0.0}, 50e9)
    assert report.bars == []
    own_account(report, "process", {"overlap": 0.97, "bytes_per_s": 40e9}, 50e9)
    assert [(bar["name"], bar["met"]) for bar in report.bars] == [
        ("process_overlap", True),
        ("process_share_of_bus", False),
    ]
