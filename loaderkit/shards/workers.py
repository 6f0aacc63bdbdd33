"""Makes shards here, or in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from queue import SimpleQueue
from threading import current_thread, main_thread
from typing import Any, NamedTuple

from loaderkit._internal.system.child_process import end_with
from loaderkit.errors import LoaderkitError, WorkerDiedError
from loaderkit.shards.job import ShardJob, ShardRecord, make_shard, pack_job, unpack_job

OnSamples = Callable[[int, int], None]
"""Called with the samples and bytes of the current shard that are made so far."""


class MadeShard(NamedTuple):
    """A shard that is done."""

    number: int
    record: ShardRecord


def make_here(job: ShardJob, numbers: Sequence[int], on_samples: OnSamples) -> Generator[MadeShard, None, None]:
    """Make shards one after another in this process."""
    for number in numbers:
        yield MadeShard(number, make_shard(job, number, on_samples))


def make_in_processes(job: ShardJob, numbers: Sequence[int], num_processes: int) -> Generator[MadeShard, None, None]:
    """Make shards in processes, one each at a time. When this ends early, by an error or Ctrl-C, no shard is left half made.

    Raises WorkerDiedError if a process died.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with tempfile.TemporaryFile() as file:  # which has no name, so that nothing is left if this process is killed
        file.write(pack_job(job))  # by a file: it may list millions of samples
        file.flush()
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        pool = ProcessPoolExecutor(num_processes, context, _begin_process, (os.getpid(), stop, path))
        try:
            yield from _made(pool, numbers)
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a process that made shards was killed, or crashed (out of memory? each holds one whole shard: choose a "
                "smaller --shard or fewer --processes). The shards that are done stay: run it again, and it goes on"
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _made(pool: ProcessPoolExecutor, numbers: Sequence[int]) -> Iterator[MadeShard]:
    finished: SimpleQueue[Future[MadeShard | LoaderkitError]] = SimpleQueue()
    with _without_ctrl_c():  # which would leave the pool's locks taken
        for number in numbers:
            pool.submit(_make, number).add_done_callback(finished.put)
    for _ in numbers:
        made = finished.get().result()
        if isinstance(made, LoaderkitError):
            raise made
        yield made


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. Processes that are started in it inherit that the signal is blocked, so an
    early Ctrl-C prints nothing there. In this process another thread may take the signal, and Python then raises in the
    main thread."""
    came: list[int] = []
    is_handled = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is not None
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_handled else None
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        if is_handled:
            signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


# ---------------------------------------------------------------------------------------------------- in a process

_stop: Any = None  # of the process
_path = ""


def _begin_process(parent: int, stop: Any, path: str) -> None:
    """Ignore Ctrl-C, which is for the parent: it asks this process to stop. The process ends with its parent."""
    global _stop, _path
    _stop, _path = stop, path
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    end_with(parent)


class _StoppedError(LoaderkitError):
    """The parent wants no more shards."""


@lru_cache(maxsize=1)
def _job_in(path: str) -> ShardJob:
    with open(path, "rb") as file:
        return unpack_job(file.read())


def _make(number: int) -> MadeShard | LoaderkitError:
    """A shard; or the error, which the parent raises: raised here, it would come with a traceback as text."""
    try:
        return MadeShard(number, make_shard(_job_in(_path), number, _check))
    except LoaderkitError as error:
        return error


def _check(num_samples: int, num_bytes: int) -> None:
    if _stop.is_set():
        raise _StoppedError("stopped")
