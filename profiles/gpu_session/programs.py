"""Programs that a step starts beside itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a program ended: `rc` is None for one that was killed at its limit."""

    rc: int | None
    seconds: float
    stdout: str
    stderr: str


def run_program(arguments: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run Python with these arguments in the checkout's folder.

    It writes to files: a pipe would be held open by what a killed program has started.
    """
    begin_s = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_paths()]), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            rc: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            rc = None
        took_s = time.perf_counter() - begin_s
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
    return Ended(rc, took_s, *said)


def run_programs(programs: Mapping[str, Sequence[str]], limit_s: float, at_once: int) -> dict[str, Ended]:
    """Several by name, `at_once` at a time, with `limit_s` seconds for all."""
    until_s = time.monotonic() + limit_s

    def run(arguments: Sequence[str]) -> Ended:
        return run_program(arguments, max(1.0, until_s - time.monotonic()))

    with ThreadPoolExecutor(at_once) as pool:
        running = {name: pool.submit(run, arguments) for name, arguments in programs.items()}
        return {name: program.result() for name, program in running.items()}


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
