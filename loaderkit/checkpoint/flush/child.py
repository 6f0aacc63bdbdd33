"""The main function of a process that writes copies of a state: its start, its calls and its end.

    parent ──make; areas, state, arguments─> calls, one at a time
           <──────────log records; result, or error────┘

It never outlives the parent: the kernel kills it with the parent, in the middle of a save if need be, which the next start
clears like any save that died. Nothing heavy is imported at the top, so that it is bound to the parent at once.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import traceback
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from loaderkit._internal.system.child_process import bind_to
from loaderkit._internal.system.log_records import forward_logs

if TYPE_CHECKING:
    from loaderkit.checkpoint.flush.shared_pages import MappedPages

BOOT = """import json, sys
parent, connection, settings = map(int, sys.argv[1:])
with open(settings) as file:
    sys.path[:], sys.argv[:] = json.load(file)
from loaderkit.checkpoint.flush.child import main
main(parent, connection)"""
"""The interpreter's -c program. `settings` is the descriptor of a file with sys.path and sys.argv, which may be too long for a
command line."""
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""The process needs host memory only: a context on the GPU would take some of the GPU's memory."""


def main(parent: int, descriptor: int) -> NoReturn:
    """Run until the parent ends the process."""
    bind_to(parent)
    connection: Connection[Any, Any] = Connection(descriptor)
    sending = threading.Lock()

    def send(*message: Any) -> None:
        packet = pickle.dumps(message, 5)
        with sending, suppress(OSError):  # the parent has ended, and this process will
            connection.send_bytes(packet)

    with suppress(_ParentEndedError):
        _serve(connection, send)
    os._exit(0)  # an orderly exit of torch takes 0.1 s


class _ParentEndedError(Exception):
    """The parent has ended, or has closed the connection."""


def _received(connection: Connection[Any, Any]) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError) as error:
        raise _ParentEndedError from error


def _serve(connection: Connection[Any, Any], send: Any) -> None:
    make, level = pickle.loads(_received(connection))  # noqa: S301 - of our own process
    from loaderkit._internal.packing import unpack
    from loaderkit.checkpoint.flush.shared_pages import MappedPages
    from loaderkit.engine.remote.error_transport import pack_error

    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # warns that there are no process groups
    forward_logs(lambda attributes: send("log", attributes), level)
    memory = MappedPages()
    try:
        function = unpack(*pickle.loads(make))(memory)  # noqa: S301 - of our own process
    except BaseException as error:
        send("failed", pack_error(error))
        return
    send("ready")
    while True:
        state, arguments = _next_call(connection, memory)
        try:
            result = function(state, *arguments)
        except BaseException as error:
            packed = pack_error(error)
            traceback.clear_frames(error.__traceback__)  # they hold the state
            send("failed", packed)
        else:
            send("done", result)
        del state


def _next_call(connection: Connection[Any, Any], memory: MappedPages) -> tuple[Any, Any]:
    """(state, arguments)."""
    from loaderkit.checkpoint.flush.transport import unpack_state

    kept, added, arguments = pickle.loads(_received(connection))  # noqa: S301 - of our own process
    memory.keep(kept)
    for number in added:
        descriptor = reduction.recv_handle(connection)
        memory.add(number, descriptor)
        os.close(descriptor)
    return unpack_state(_received(connection), memory), arguments
