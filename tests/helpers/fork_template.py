"""A process that has imported torch and forks itself into Python programs; forked_programs.py says what for."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from loaderkit._internal.system.child_process import MEANT_FOR_THE_PARENT, end_with

MESSAGE_BYTES = 2**18
COMMAND_BYTES = 2**14  # of an argument of the template's, in whose place a program's command is seen from outside
_PRELOAD = (
    "loaderkit.engine.process.batch_sender",
    "loaderkit.pipeline.executors.process_setup",
    "loaderkit.checkpoint.manager.manager",
)
_OUT_OF_THE_WAY = 500  # beyond the numbers of descriptors that are asked for


def serve(parent: int, number: int) -> Callable[[], None]:
    """Fork as it is told over a socket, the descriptor `number`, and say the pid of each fork. Returns in a fork alone: what it
    is to run, which must be called where no frame of the template's is left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_PARENT)
    end_with(parent)
    path = [folder for folder in sys.path if folder not in ["", *_folders(os.environ)]]
    orders = socket.socket(fileno=number)
    while True:
        packet, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 64)
        if not packet:  # the tests have ended
            os._exit(0)
        order = json.loads(packet)
        _import_once()
        pid = os.fork()
        if pid == 0:
            orders.close()
            _leave_a_fork(descriptors[0], order)
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            own, theirs = (end.detach() for end in ends)  # no object closes a number that is another's by then
            if order["forks"] and os.fork() == 0:
                os.closerange(3, theirs)
                os.closerange(theirs + 1, _OUT_OF_THE_WAY)
                return serve(os.getppid(), theirs)
            return _become(order, descriptors, path, own)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(pid, 0)
        with suppress(OSError):  # whoever asked has ended
            orders.send(b"forked")


def _import_once() -> None:
    if _PRELOAD[0] not in sys.modules:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        for name in _PRELOAD:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # or each fork would copy all pages that hold objects


def _leave_a_fork(answering: int, order: dict[str, Any]) -> None:
    """Go on in a fork of this one, which is an orphan when that ends, and so becomes a child of those who asked. They may send
    signals to its group at once, so it has its own by then."""
    pid = os.fork()
    if pid:
        os._exit(0)
    if order["session"]:
        os.setsid()
    if order["group"] >= 0:
        os.setpgid(0, order["group"])
    with socket.socket(fileno=os.dup(answering)) as answers:
        answers.send(str(os.getpid()).encode())
        answers.recv(1)  # it is their child


def _become(order: dict[str, Any], descriptors: list[int], path: list[str], own: int) -> Callable[[], None]:
    """Leave nothing of the template but what it has imported; the program. `own` leads to a template that it asks, if it has
    one."""
    if order["forks"]:
        own = fcntl.fcntl(own, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for descriptor in descriptors[1:]]
    os.closerange(3, _OUT_OF_THE_WAY)
    for descriptor, number in zip(away, order["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _stream(number, getattr(sys, name)))
        setattr(sys, f"__{name}__", getattr(sys, name))
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()
    tempfile.tempdir = None
    _show(order["command"])
    sys.orig_argv[:] = order["command"]
    sys.argv[:] = order["argv"]
    if order["forks"]:
        forked_programs = importlib.import_module("forked_programs")
        forked_programs.use(forked_programs.Template(socket.socket(fileno=own), forks=True))
        del sys.modules["forked_programs"]
    del sys.modules["fork_template"]
    main = vars(sys.modules["__main__"])
    for name in set(main) - {"__builtins__", "__loader__", "__spec__", "__package__", "__doc__"}:
        del main[name]
    main["__name__"] = "__main__"
    first = [] if order["safe"] else [_FIRST[order["kind"]](order["program"])]
    sys.path[:] = [*first, *_folders(order["environment"]), *path]
    signal.pthread_sigmask(signal.SIG_SETMASK, order["blocked"])
    return _PROGRAMS[order["kind"]](order["program"], main)


def _stream(number: int, old: Any) -> io.TextIOWrapper:
    """In place of a standard stream, which knows of its old file that one can seek in it."""
    file = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115 - it stays open
    return io.TextIOWrapper(file, old.encoding, old.errors, "\n" if number else None, line_buffering=number == 2)


def _folders(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _show(command: list[str]) -> None:
    """Have the system show `command` as this process's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _code(program: str, main: dict[str, Any]) -> Callable[[], None]:
    code = compile(program, "<string>", "exec")
    return lambda: _run(lambda: exec(code, main))


def _script(program: str, main: dict[str, Any]) -> Callable[[], None]:
    main |= {"__file__": program, "__cached__": None}
    return lambda: _run(lambda: exec(compile(Path(program).read_bytes(), program, "exec"), main))


def _module(program: str, main: dict[str, Any]) -> Callable[[], None]:
    return lambda: _run(lambda: runpy.__dict__["_run_module_as_main"](program))  # as the interpreter does


_PROGRAMS = {"-c": _code, "-m": _module, "script": _script}
_FIRST: dict[str, Callable[[str], str]] = {
    "-c": lambda _: "",
    "-m": lambda _: os.getcwd(),
    "script": lambda program: str(Path(program).resolve().parent),
}
"""The first folder of `sys.path`."""


def _run(program: Callable[[], object]) -> None:
    """Run it, with an error's traceback as it would be without the template."""
    try:
        program()
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
