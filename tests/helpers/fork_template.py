"""A process that has imported torch and forks itself into worker processes; forked_workers.py says what for."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NoReturn

from loaderkit._internal.system.child_process import MEANT_FOR_THE_PARENT, end_with

MESSAGE_BYTES = 2**18
_PRELOAD = (
    "loaderkit.engine.process.batch_sender",
    "loaderkit.pipeline.process_setup",
    "loaderkit.checkpoint.manager.manager",
)
_OUT_OF_THE_WAY = 500  # beyond the numbers of descriptors that are asked for


def serve(parent: int, number: int) -> NoReturn:
    """Fork as it is told over a socket, the descriptor `number`; say of each fork its pid, and how it ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_PARENT)  # a worker begins so, and unblocks them
    end_with(parent)
    orders = socket.socket(fileno=number)
    waiting = selectors.DefaultSelector()
    waiting.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is orders:
                _begin(orders, waiting)
                continue
            waiting.unregister(key.fileobj)
            os.close(key.fd)
            pid, answers = key.data
            _, status = os.waitpid(pid, 0)
            with answers, suppress(OSError):
                answers.send(str(os.waitstatus_to_exitcode(status)).encode())


def _begin(orders: socket.socket, waiting: selectors.BaseSelector) -> None:
    packet, passed, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 64)
    if not packet:  # the tests have ended
        os._exit(0)
    answering, *descriptors = passed
    order = json.loads(packet)
    _import_once(order["path"])
    pid = os.fork()
    if pid == 0:
        _become(order, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    answers = socket.socket(fileno=answering)
    with suppress(OSError):  # nobody waits any more
        answers.send(str(pid).encode())
    waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))


def _import_once(path: list[str]) -> None:
    if _PRELOAD[0] not in sys.modules:
        sys.path[:] = path
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        for name in _PRELOAD:
            importlib.import_module(name)


def _become(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run the program, with nothing left of the template but what it has imported."""
    code = 1
    try:
        away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for descriptor in descriptors]
        os.closerange(3, _OUT_OF_THE_WAY)
        for descriptor, number in zip(away, order["numbers"], strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv[:] = ["-c", *order["arguments"]]
        random.seed()
        sys.modules["numpy"].random.seed()
        del sys.modules["fork_template"]
        exec(order["program"], {"__name__": "__main__"})
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
