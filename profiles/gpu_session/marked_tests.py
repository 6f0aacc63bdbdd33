"""The tests marked `gpu`, in the files that need no DALI and in those that do."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter

from profiles.gpu_session import tell_failures
from profiles.gpu_session.context import Context, Skipped
from profiles.gpu_session.programs import run_program
from profiles.gpu_session.tell_failures import failures_in

WITHOUT_DALI = (
    "tests/stages/test_transfer_gpu.py",
    "tests/checkpoint/restore/test_gpu.py",
    "tests/engine/remote/test_trainer_stages.py",
)
# What is told nowhere else in the session comes first: `levels` compares crops, too.
WITH_DALI = (
    "tests/stages/image/test_dali_lane.py",
    "tests/stages/image/test_dali.py::TestOnAGpu",
    "tests/stages/image/test_dali.py::TestOtherFormats",
    "tests/stages/image/test_dali.py::TestDamaged",
    "tests/stages/image/test_dali.py::TestTheSame",
)
# "tests/a.py::test PASSED", or by a worker of xdist "[gw0] [ 12%] PASSED tests/a.py::test".
_RESULT = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>[A-Z]+) )?(?P<name>tests/\S+::.+?)(?: (?P<last>PASSED|FAILED|ERROR|SKIPPED)\b.*)?$",
    re.MULTILINE,
)
_WHY = re.compile(r"^(?:FAILED|ERROR|SKIPPED) .*$", re.MULTILINE)
_LONGEST = 400


def without_dali(context: Context) -> None:
    """Transfer, restore and the stages behind them, on a GPU."""
    _run(context, WITHOUT_DALI)


def with_dali(context: Context) -> None:
    """Decoding on a GPU."""
    if importlib.util.find_spec("nvidia.dali") is None:
        raise Skipped("DALI is not installed")
    _run(context, WITH_DALI)


def _run(context: Context, files: tuple[str, ...]) -> None:
    """Each test has a limit of its own where pytest-timeout is installed, and a process that dies costs its test alone where
    pytest-xdist is."""
    arguments = ["-m", "pytest", "-m", "gpu", "-v", "-rfEs", "--tb=short", "-W", "default"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the second warns where xdist is at work
    arguments += ["-p", tell_failures.__name__]
    if importlib.util.find_spec("pytest_timeout"):
        arguments += ["--timeout=40", "--timeout-method=thread"]
    if importlib.util.find_spec("xdist"):
        arguments += ["-n", "6" if context.on_gpu else "0"]
    ended = run_program([*arguments, *files], context.left_s(), {"PYTHONDONTWRITEBYTECODE": "1"})
    sys.stderr.write(ended.stdout + ended.stderr)
    outcomes = outcomes_in(ended.stdout)
    counts = Counter(outcomes.values())
    context.report.add(rc=ended.rc, tests_s=ended.seconds, **{f"num_{name}": count for name, count in counts.items()})
    context.report.add(not_passed=[why[:_LONGEST] for why in _WHY.findall(ended.stdout)])
    failures = failures_in(ended.stdout)
    if failures:
        context.report.add(failures=failures)
    if ended.rc != 0:
        sys.stderr.writelines(f"\n{name}\n{text}\n" for name, text in failures.items())  # last, as a line keeps the end
        raise SystemExit(f"pytest ended with {ended.rc}")
    if not counts["passed"]:
        raise Skipped("no CUDA device; the tests were collected" if not context.on_gpu else "every test skips itself")


def outcomes_in(said: str) -> dict[str, str]:
    """ "passed", "failed", "error" or "skipped", by test, also of a run that was ended."""
    found = {}
    for match in _RESULT.finditer(said):
        if (outcome := match["first"] or match["last"]) is not None:
            found[match["name"]] = outcome.lower()
    return found
