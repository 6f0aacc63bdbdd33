"""Samples which line of the user's code makes batches: in the loop's process, and in the worker processes of a DataLoader.

    a thread wakes every 10 to 100 ms ──> the main thread's frames, innermost first, up to torch's fetcher ──> seconds by line
        in a worker: every 0.25 s, then ever more seldom, and at its end ──> a file in memory that the loop's process reads

Only time below torch's fetcher counts: outside of it a worker waits for work. The interval grows where a sample
costs more than usual, so that all samples take 0.3 % of a CPU. No variable of a frame is read.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import json
import os
import random
import re
import signal
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from loaderkit.diagnosis.watched.lines import COLLATE, DECODE, OPEN, TRANSFORM
from loaderkit.native import take_sample, wait_to_sample

_LEAST_S, _MOST_S = 0.01, 0.1  # between two samples
_COST = 0.003  # share of a CPU
_SIGNAL = signal.SIGURG  # which is ignored by default, and which hardly anything uses
_FIRST_WRITE_S, _MOST_WRITE_S = 0.25, 60.0
_MOST_LINES = 4096
_MOST_BYTES = 16 * 2**20  # of what workers write; workers that are begun anew for each epoch write at the end of each

_GROUPS = {
    COLLATE: r"torch/utils/data/_utils/collate\.py:",
    DECODE: r"PIL/\w+\.py:load|torchvision/io/(?!.*:read_file)|torchcodec/|torchaudio/|soundfile\.py:|librosa/|imageio/"
    r"|skimage/io/|/av/|decord/|json/|/pickle\.py:|simplejpeg",
    OPEN: r"PIL/Image\.py:(?:open|_open_core|preinit|init)$|PIL/ImageFile\.py:|PIL/\w+ImagePlugin\.py:|torchvision/io/"
    r"|torch/serialization\.py:|numpy/lib/\w*npyio\w*\.py:|numpy/\w+/memmap\.py:|h5py/|zarr/|pyarrow/|fsspec/|s3fs/|gcsfs/"
    r"|boto3/|botocore/|s3torchconnector/|urllib3/|requests/|httpx/|/(?:socket|ssl|pathlib|zipfile|tarfile|gzip|lzma|bz2|shutil"
    r"|codecs|glob|_pyio|subprocess|mmap)\.py:|/(?:urllib|http|sqlite3|lmdb|pathlib|zipfile)/",
    TRANSFORM: r"PIL/|torchvision/(?:transforms|tv_tensors)/|torch/nn/|albumentations/|kornia/|scipy/|skimage/|imgaug/|cv2/",
}
_GROUP = re.compile("|".join(f"({pattern})" for pattern in _GROUPS.values()))
_STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_FOLDERS = (*_STANDARD, f"{Path(__file__).parents[2]}{os.sep}")
_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\]|^<(?!stdin)|^" + "|^".join(map(re.escape, _FOLDERS)))
_FETCH, _OF_TORCH = "torch/utils/data/_utils/fetch.py", "/torch/utils/data/"


class CodePlace(NamedTuple):
    """The place in the code where loading is: the user's own line, and the lines around it."""

    file: str  # of the deepest frame that is no library's; of the data set's own, where all are
    line: int
    function: str
    group: str | None  # what libraries do for that line; None if not known, or without
    inside_file: str  # of the innermost frame of a library below that line; "": there is none
    inside: str  # its function
    fetch_file: str
    fetch_line: int  # in torch's fetcher: the data set or `collate_fn`


Rows = dict[CodePlace, tuple[float, int]]
"""Seconds, and samples."""


class Sampler:
    """Samples what the main thread of this process loads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rows: Rows = {}
        self.is_over, self._signal = False, 0
        self._clock, self._began_s = clock, clock()
        self._mark_s = self._began_s
        self._main = threading.main_thread().ident or 0
        self._main_cost_s = self._own_cost_s = 0.0

    @property
    def wall_s(self) -> float:
        """Since it was made."""
        return self._clock() - self._began_s

    def begin(self) -> None:
        """Sample from now on, in a thread that is none of threading.enumerate(): a script may count those."""
        with contextlib.suppress(ValueError):  # this is not the main thread
            before = signal.getsignal(_SIGNAL)
            if before is signal.SIG_DFL or isinstance(getattr(before, "__self__", None), Sampler):  # or of the parent
                signal.signal(_SIGNAL, self._sample_in_main)
                signal.siginterrupt(_SIGNAL, False)
                self._signal = _SIGNAL
        with contextlib.suppress(RuntimeError):  # no thread may be had: the script loads without being sampled
            _thread.start_new_thread(self._run, ())

    def end(self) -> None:
        """Sample no more."""
        self.is_over = True
        with contextlib.suppress(ValueError):
            if self._signal and signal.getsignal(_SIGNAL) == self._sample_in_main:
                signal.signal(_SIGNAL, signal.SIG_DFL)

    def resume(self, rows: Rows) -> None:
        """The main thread loads from now on; add to `rows`."""
        self.rows = rows

    def tick(self) -> None:
        """Called every now and then by the thread that samples."""

    def sample(self) -> None:
        """Charge the time since the last sample to where the main thread is. It may have done something else meanwhile,
        but that evens out, because the time of a sample is independent of the work. A call that holds the GIL delays
        the sample, and so gets its time."""
        now_s, rows = self._clock(), self.rows
        place = place_of(sys._current_frames().get(self._main))
        if place is not None and (place in rows or len(rows) < _MOST_LINES):
            seconds, number = rows.get(place, (0.0, 0))
            rows[place] = (seconds + now_s - self._mark_s, number + 1)
        self._mark_s = now_s

    @property
    def cost_s(self) -> float:
        """CPU time of all that sampling takes, in whatever thread."""
        return self._main_cost_s + self._own_cost_s

    def _sample_in_main(self, number: int, frame: FrameType | None) -> None:
        if not take_sample():
            return
        begin_s = time.thread_time()
        collecting_s = self._sample_noting_collection()
        self._main_cost_s += time.thread_time() - begin_s - collecting_s

    def _sample_noting_collection(self) -> float:
        """Sample; returns the CPU time of this if garbage was collected meanwhile, else 0. What a sample allocates may set off
        a collection, which takes 0.1 s beside torch's modules and would come a little later anyway: no cost of sampling."""
        begin_s, num_collections = time.thread_time(), gc.get_stats()[2]["collections"]
        self.sample()
        is_apart = gc.get_stats()[2]["collections"] != num_collections
        return time.thread_time() - begin_s if is_apart else 0.0

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the script's own threads
        jitter = random.Random(os.urandom(8))  # noqa: S311  # not the script's generator
        begin_s, interval_s, mean_s, before_s = time.thread_time(), _LEAST_S, 0.0, 0.0
        # The main thread has the number of the process. In a child of os.fork, `native_id` still is the parent's.
        with open(f"/proc/self/task/{os.getpid()}/stat", "rb") as stat:
            while not self.is_over:
                sleep_s = interval_s * jitter.uniform(0.5, 1.5)
                is_ours = (
                    self._signal and signal.getsignal(self._signal) == self._sample_in_main
                )  # no handler set since
                number = self._signal if is_ours else 0
                if wait_to_sample(sleep_s, self._main, stat.fileno(), number) and not self.is_over:
                    begin_s += self._sample_noting_collection()
                self.tick()
                self._own_cost_s = time.thread_time() - begin_s
                mean_s += (self.cost_s - before_s - mean_s) / 16  # the first ones take longer, to look at new code
                before_s = self.cost_s
                interval_s = min(_MOST_S, max(_LEAST_S, mean_s / _COST))


def place_of(frame: FrameType | None) -> CodePlace | None:
    """Where a thread that loads is, or None if it does not load. Takes 3 to 10 us."""
    own: FrameType | None = None
    outermost: FrameType | None = None
    inside, group = ("", ""), None
    while frame is not None:
        code = frame.f_code
        kind = _kind_of(code.co_filename, code.co_name)
        if kind.is_fetch:
            own = own or outermost or frame
            at = own.f_code
            return CodePlace(
                at.co_filename, _line_of(own), at.co_qualname, group, *inside, code.co_filename, _line_of(frame)
            )
        if own is None and not kind.is_ours:
            if not kind.is_library:
                own = frame
            else:
                group = group or kind.group
                inside = inside if inside[0] else (code.co_filename, code.co_qualname)
                outermost = frame if kind.may_be_named or outermost is None else outermost
        frame = frame.f_back
    return None


def _line_of(frame: FrameType) -> int:
    """The line of a frame; for an instruction without one (f_lineno is None then), the function's first line."""
    return frame.f_lineno or frame.f_code.co_firstlineno


class _Kind(NamedTuple):
    is_fetch: bool
    is_ours: bool
    is_library: bool
    may_be_named: bool  # where no line is the user's
    group: str | None


@lru_cache(_MOST_LINES)
def _kind_of(file: str, name: str) -> _Kind:
    unix = file.replace("\\", "/")
    is_fetch = unix.endswith(_FETCH)
    found = _GROUP.search(f"{unix}:{name}")
    group = None if found is None else [*_GROUPS][(found.lastindex or 1) - 1]
    return _Kind(
        is_fetch=is_fetch and name == "fetch",
        is_ours=is_fetch or file.startswith(str(Path(__file__).parent)),
        is_library=_LIBRARIES.search(file) is not None,
        may_be_named=_OF_TORCH not in unix,
        group=group,
    )


# ------------------------------------------------------------------------------------------------ worker processes


class WorkerLines:
    """A file in memory to which worker processes append what they have sampled. It has no name, and is gone when this
    process ends."""

    def __init__(self) -> None:
        self._file = os.memfd_create("loaderkit-lines")
        weakref.finalize(self, os.close, self._file)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> Iterator[dict[str, Any]]:
        """What has been written: rows of CodePlace's fields, seconds and samples; the cost, and the time that it is of."""
        for line in os.pread(self._file, 2 * _MOST_BYTES, 0).splitlines():
            with contextlib.suppress(ValueError):  # the last one may be half there
                yield json.loads(line)


class _WorkerSampler(Sampler):
    """Samples in a worker process, and writes to the file of the loop's process."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._written_s, self._written_cost_s = self._began_s, 0.0
        self._wait_s = _FIRST_WRITE_S

    def tick(self) -> None:
        """Write, ever more seldom."""
        if self._clock() - self._written_s > self._wait_s:
            self._wait_s = min(_MOST_WRITE_S, 2 * self._wait_s)
            self.write()

    def write(self) -> None:
        """Append what has come since the last time, in one piece."""
        rows, self.rows, now_s, cost_s = self.rows, {}, self._clock(), self.cost_s
        values = {
            "rows": [[*place, *sums] for place, sums in list(rows.items())],
            "cost_s": cost_s - self._written_cost_s,
            "wall_s": now_s - self._written_s,
        }
        self._written_s, self._written_cost_s = now_s, cost_s
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_size < _MOST_BYTES:
                os.write(self._file, f"{json.dumps(values)}\n".encode())

    def end(self) -> None:
        """The worker has come to its end."""
        super().end()
        self.write()


def sampled_init(original: Callable[[int], None] | None, path: str) -> Callable[[int], None]:
    """A `worker_init_fn` that calls `original`, and then begins to sample. It can be pickled if that can."""
    return partial(_init_worker, original, path)


def _init_worker(original: Callable[[int], None] | None, path: str, worker: int) -> None:
    if original is not None:
        original(worker)
    with contextlib.suppress(OSError, RuntimeError):  # the script loads without being sampled as well
        sampler = _WorkerSampler(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
        Finalize(None, sampler.end, exitpriority=100)
        sampler.begin()
