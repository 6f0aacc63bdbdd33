"""The harness's end of a worker process: orders, answers, stopping and killing."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from profiles.peers import processes
from profiles.peers.environments import ROOT, environ_of
from profiles.peers.works import Contestant, Work

_TIMEOUT_S = 150.0
_GRACE_S = 3.0


class ContestantError(Exception):
    """What a contestant failed with, as it said it."""


class Child:
    """A contestant in a process and session of its own; it runs only while it has an order."""

    def __init__(self, python: Path, work: Work, contestant: Contestant, root: Path, environ: dict[str, str]) -> None:
        self.contestant = contestant
        if not python.exists():
            raise ContestantError(f"there is no environment {contestant.environment!r} ({python}): make peers")
        spec = {
            "module": contestant.module,
            "work": work.name,
            "look": contestant.look or work.look,
            "settings": dict(contestant.settings),
            "root": str(root),
        }
        # Modules are compiled once, as those of what pip installed were.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        tree = contestant.tree or str(ROOT)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            [str(python), "-m", "profiles.peers.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=tree,
            env={**inherited, "PYTHONPATH": tree, **environ_of(contestant.environment), **environ},
            start_new_session=True,
        )
        self._rest = b""

    def ask(self, order: str, timeout: float = _TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Let it run until it has obeyed, then stop it. Raises ContestantError."""
        assert self._process.stdin is not None
        processes.send(self._process.pid, signal.SIGCONT)
        try:
            self._process.stdin.write((json.dumps({"do": order, **arguments}) + "\n").encode())
            self._process.stdin.flush()
            answer = json.loads(self._line(time.monotonic() + timeout))
        except BrokenPipeError:
            raise ContestantError(f"its process is gone\n{self._said()}") from None
        finally:
            processes.send(self._process.pid, signal.SIGSTOP)
        if "error" in answer:
            raise ContestantError(f"{answer['error']}\n{self._said()}")
        found: dict[str, Any] = answer["ok"]
        return found

    def end(self) -> None:
        """Kill it, with all it started."""
        session = self._process.pid
        seen = set(processes.members(session))
        # multiprocessing's tracker gives back the shared memory of those that died, so it is left some time to do it.
        deadline = time.monotonic() + _GRACE_S
        processes.send(session, signal.SIGKILL, spare="resource_tracker")
        processes.send(session, signal.SIGCONT)
        while found := processes.members(session):
            seen.update(found)
            processes.send(session, signal.SIGKILL, spare="resource_tracker" if time.monotonic() < deadline else None)
            time.sleep(0.02)
            self._process.poll()
        self._process.wait()
        # A batch that a worker of torch was about to send lies there under a name that nobody else knows.
        for process in seen:
            for path in Path("/dev/shm").glob(f"torch_{process}_*"):
                path.unlink(missing_ok=True)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ContestantError(f"no answer in time\n{self._said()}")
            found = os.read(self._process.stdout.fileno(), 1 << 16)
            if not found:
                raise ContestantError(f"its process ended\n{self._said()}")
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _said(self) -> str:
        """The end of what it wrote to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]
