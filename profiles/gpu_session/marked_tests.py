"""The tests marked `gpu`, in the files that need no DALI and in those that do."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from profiles.gpu_session.context import Context, Skipped
from profiles.gpu_session.programs import run_program

WITHOUT_DALI = (
    "tests/stages/test_transfer_gpu.py",
    "tests/checkpoint/restore/test_gpu.py",
    "tests/engine/remote/test_trainer_stages.py",
)
WITH_DALI = ("tests/stages/image/test_dali.py", "tests/stages/image/test_dali_lane.py")
_RESULT = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b\s*(?:\[(\d+)\]\s*)?(.*)$", re.MULTILINE)
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
    arguments = ["-m", "pytest", "-m", "gpu", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "-W", "default"]
    if importlib.util.find_spec("pytest_timeout"):
        arguments += ["--timeout=40", "--timeout-method=thread"]
    if importlib.util.find_spec("xdist"):
        arguments += ["-n", "4" if context.on_gpu else "0", "--maxprocesses=4"]
    ended = run_program([*arguments, *files], context.left_s(), {"PYTHONDONTWRITEBYTECODE": "1"})
    sys.stderr.write(ended.stdout + ended.stderr)
    found: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for outcome, number, what in _RESULT.findall(ended.stdout):
        counts[outcome] = counts.get(outcome, 0) + int(number or 1)
        found.setdefault(outcome, []).append(_short_name(what))
    context.report.add(**{f"num_{outcome.lower()}": count for outcome, count in counts.items()})
    context.report.add(rc=ended.rc, tests_s=ended.seconds)
    for outcome in ("FAILED", "ERROR", "SKIPPED"):
        if outcome in found:
            context.report.add(**{outcome.lower(): found[outcome]})
    if ended.rc != 0:
        raise SystemExit(f"pytest ended with {ended.rc}")
    if "PASSED" not in counts:
        raise Skipped("no CUDA device; the tests were collected" if not context.on_gpu else "every test skips itself")


def _short_name(what: str) -> str:
    """"tests/a/test_b.py::test_c - AssertionError" without the folders."""
    name, _, why = what.partition(" - ")
    return f"{Path(name.split('::')[0]).name}::{'::'.join(name.split('::')[1:])} {why}".strip()[:_LONGEST]
