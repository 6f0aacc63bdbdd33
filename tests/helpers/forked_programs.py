"""Python programs for tests that are not about how one starts: forks of a process that has imported torch already.

A fresh interpreter that imports torch takes 2 s of CPU, and the tests begin hundreds: worker processes, and programs of their
own. A fork is a process all the same: it has memory, descriptors, a pid and an end of its own, runs the same program, is a
child of the process that asked for it, and dies with it. What only a fresh interpreter proves (what it imports, its hash seed,
its limits) tests marked `fresh_interpreters` prove, and `make prove` begins no others.

What such a program begins is a fresh interpreter, except in tests marked `forked_workers`: a program that is a fork cannot ask
for forks of another's template, which would not be its children, so there each has a template of its own, forked before it.
"""

from __future__ import annotations

import _posixsubprocess
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fork_template import COMMAND_BYTES, MESSAGE_BYTES

_ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36
_BOOT = """import sys
from fork_template import serve
serve(*map(int, sys.argv[1:3]))()"""
_SCRIPTS = {Path(sys.executable).parent / name for name in ("loaderkit", "torchrun")}
_READ_EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ")
"""Variables with these beginnings are read before a fork could change them."""
_start_fresh = subprocess._fork_exec  # type: ignore[attr-defined]


@contextmanager
def a_template() -> Iterator[Template]:
    """A process that imports torch before its first fork, and ends with this one."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    helpers = Path(__file__).parent
    path = os.pathsep.join([str(helpers), str(helpers.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(os.getpid()), str(theirs.fileno()), COMMAND_BYTES * " "],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )
    with orders:
        yield Template(orders)
    process.wait()


def use(template: Template) -> None:
    """Begin this process's Python programs by it."""
    subprocess._fork_exec = template.fork_exec  # type: ignore[attr-defined]
    _posixsubprocess.fork_exec = template.fork_exec  # multiprocessing's "spawn"


class Template:
    """The process whose forks become programs, and tell it so over the socket `orders`. Where it `forks`, what these begin are
    forks, too."""

    def __init__(self, orders: socket.socket, *, forks: bool = False) -> None:
        self.forks = forks
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._orders = orders
        self._early = _read_early(os.environb)

    def fork_exec(self, *arguments: Any) -> int:
        """In place of what `subprocess` begins programs with: the pid of one, a fork if that can stand for a fresh process."""
        order = self._order(*arguments)
        return int(_start_fresh(*arguments)) if order is None else self._fork(*order)

    def _order(
        self,
        command: Any,
        executables: Any,
        are_closed: bool,
        kept: tuple[int, ...],
        folder: Any,
        environment: Any,
        stdin: int,
        _0: int,
        _1: int,
        stdout: int,
        _2: int,
        stderr: int,
        _3: int,
        errors: int,
        restores_signals: bool,
        session: bool,
        group: int,
        *others: Any,
    ) -> tuple[dict[str, Any], list[int]] | None:
        """What to tell the template, and the descriptors that go with it; None if a fork is not the same."""
        words = [os.fsdecode(word) for word in command]
        program = _program_of(words)
        variables = os.environb if environment is None else dict(entry.split(b"=", 1) for entry in environment)
        standard = [given if given >= 0 else number for number, given in enumerate((stdin, stdout, stderr))]
        if (
            program is None
            or os.getpid() != self._pid
            or any(map(callable, others))  # preexec_fn
            or not are_closed
            or _read_early(variables) != self._early
            or _has_its_own(os.fsdecode(variables.get(b"PYTHONPATH", b"")))
            or not all(map(_can_be_passed, standard))
        ):
            return None
        passed = [number for number in kept if number != errors]
        order = program | {
            "command": words,
            "numbers": [0, 1, 2, *passed],
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()},
            "folder": os.path.abspath(os.fsdecode(folder or ".")),
            "session": bool(session),
            "forks": self.forks,
            "group": group,
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        }
        return order, [*standard, *passed]

    def _fork(self, order: dict[str, Any], descriptors: list[int]) -> int:
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answers, self._lock:
            _adopt_orphans(True)
            with theirs:
                socket.send_fds(self._orders, [json.dumps(order).encode()], [theirs.fileno(), *descriptors])
            pid = int(answers.recv(MESSAGE_BYTES))
            self._orders.recv(MESSAGE_BYTES)
            _adopt_orphans(False)
            answers.send(b".")
        return pid


def _program_of(words: list[str]) -> dict[str, Any] | None:
    """What a command runs, if that is a Python program without options that an interpreter reads when it starts."""
    if Path(words[0]) in _SCRIPTS:
        return {"kind": "script", "program": words[0], "safe": False, "argv": words}
    if words[0] != sys.executable:
        return None
    words = [word for number, word in enumerate(words) if (number, word) != (1, "-B")]  # what is compiled is not kept
    is_safe = words[1:2] == ["-P"]
    words = words[2:] if is_safe else words[1:]
    if words[:1] in (["-c"], ["-m"]) and len(words) > 1:
        return {"kind": words[0], "program": words[1], "safe": is_safe, "argv": [words[0], *words[2:]]}
    if not words or words[0].startswith("-"):
        return None
    return {"kind": "script", "program": words[0], "safe": is_safe, "argv": words}


def _read_early(variables: Any) -> dict[bytes, bytes]:
    """What a fork could not change of an environment any more."""
    early = tuple(map(os.fsencode, _READ_EARLY))
    # The latter is set by importing threadpoolctl, here and there.
    others = (b"PYTHONPATH", b"KMP_DUPLICATE_LIB_OK")
    return {name: variables[name] for name in variables if name.startswith(early) and name not in others}


def _has_its_own(path: str) -> bool:
    """Whether a PYTHONPATH has what the template has imported from elsewhere, or what an interpreter imports when it starts."""
    names = ("loaderkit", "sitecustomize.py", "usercustomize.py")
    folders = [Path(folder) for folder in path.split(os.pathsep) if folder]
    return any((folder / name).exists() for folder in folders if folder.resolve() != _ROOT for name in names)


def _can_be_passed(descriptor: int) -> bool:
    try:
        return (os.get_inheritable(descriptor) or descriptor > 2) and not os.isatty(descriptor)
    except OSError:
        return False


def _adopt_orphans(does: bool) -> None:
    """Whether orphans below this process become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(does), 0, 0, 0)
