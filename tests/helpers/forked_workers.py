"""Worker processes for tests that are not about how one starts: forks of a process that has imported torch already.

A worker that begins as a fresh interpreter imports torch, which takes 1.8 s of CPU, and hundreds of tests begin some. A fork is
a process all the same: it has memory, descriptors, a pid and an end of its own, runs the same program, and dies with whoever
began it. What only a fresh interpreter proves (what it imports, its hash seed, its limits) tests marked `fresh_workers` prove,
and `make prove` begins no others.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fork_template import MESSAGE_BYTES

from loaderkit._internal.system import child_process

_BOOT = """import sys
parent, number, *sys.path[:0] = sys.argv[1:]
from fork_template import serve
serve(int(parent), int(number))"""
RUNNING: list[int] = []
"""The pid of this process's template, once it runs."""


def forks() -> list[int]:
    """The pids of those that run."""
    files = [Path(f"/proc/{template}/task/{template}/children") for template in RUNNING]
    return [int(pid) for file in files for pid in file.read_text().split()]


class Template:
    """The process whose forks become workers; it imports torch before the first one, and ends with the thread that makes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        helpers = Path(__file__).parent
        numbers = [str(os.getpid()), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *numbers, str(helpers), str(helpers.parents[1])],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        RUNNING.append(self._process.pid)

    def close(self) -> None:
        """End it, and with it what it has begun."""
        self._orders.close()
        self._process.wait()
        RUNNING.clear()

    def keep(
        self, command: Sequence[str], descriptors: Sequence[int], environment: Mapping[str, str] | None, life: Any
    ) -> None:
        """In place of `_keep` of child_process.py: begin the process, and wait for its end."""
        signal.pthread_sigmask(signal.SIG_BLOCK, child_process.MEANT_FOR_THE_PARENT)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            try:
                with theirs:
                    self._send(command, descriptors, environment, theirs)
                pid = int(ours.recv(MESSAGE_BYTES))
            except BaseException as error:
                life.started.put(error)
                return
            life.started.put(pid)
            code = ours.recv(MESSAGE_BYTES)
            life.exit_code = int(code) if code else None  # the template has ended, and so has it
        life.ended.set()

    def _send(
        self,
        command: Sequence[str],
        descriptors: Sequence[int],
        environment: Mapping[str, str] | None,
        answers: socket.socket,
    ) -> None:
        _, *options, program, parent = command[:5]
        assert options == ["-P", "-c"], "a fork has the template's options"
        assert parent == str(os.getpid())
        order = {
            "program": program,
            "arguments": [str(self._process.pid), *command[5:]],  # its parent is the template
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.getcwd(),
            "path": [folder for folder in sys.path if folder],
            "numbers": [1, 2, *descriptors],
        }
        with open(os.devnull, "w") as nowhere, self._lock:
            streams = [number if _is_inherited(number) else nowhere.fileno() for number in (1, 2)]
            passed = [answers.fileno(), *streams, *descriptors]
            socket.send_fds(self._orders, [json.dumps(order).encode()], passed)


def _is_inherited(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False
