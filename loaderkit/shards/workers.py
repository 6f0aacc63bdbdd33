"""Makes shards here, or in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from typing import Any, NamedTuple

from loaderkit._internal.system.child_process import end_with
from loaderkit.errors import LoaderkitError, WorkerDiedError
from loaderkit.shards.job import ShardJob, ShardRecord, make_shard, pack_job, unpack_job

OnSamples = Callable[[int, int], None]
"""Gets the samples and bytes of the shard at work that are made so far."""


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
    # The processes are started in here. They inherit what is blocked: an early Ctrl-C prints nothing there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        running: set[Future[MadeShard | LoaderkitError]] = {pool.submit(_make, number) for number in numbers}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while running:
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            made = future.result()
            if isinstance(made, LoaderkitError):
                raise made
            yield made


# ---------------------------------------------------------------------------------------------------- in a process

_stop: Any = None  # of the process
_path = ""


def _begin_process(parent: int, stop: Any, path: str) -> None:
    """Ctrl-C is the parent's, which asks this process to stop; and it ends with the parent."""
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
