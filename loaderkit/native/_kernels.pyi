"""What the C module `_kernels` offers; how it does it is said in csrc/kernels.h."""

from collections.abc import Callable, Container, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Pixels = NDArray[np.uint8]
Status = tuple[int, int, int, int]
"""(bytes read, mode, size, time of change in ns) of a file."""

# ------------------------------------------------------------------------------------------------ files

def read_range(path: str, start: int, buffer: memoryview, direct: bool) -> Status:
    """Open, stat, read, close; only a regular file is read. `direct`: past the page cache, where the file allows it."""

def read_hashed(
    path: str, start: int, buffer: memoryview, block: int, address: int, direct: bool
) -> tuple[Status, list[int], float]:
    """`read_range`, the hashes of the blocks of `block` bytes by the C function at `address`, and the seconds they took."""

def gather_ranges(path: str, starts: Int64s, length: int, buffer: memoryview) -> Status:
    """`read_range` of several ranges of `length` bytes, concatenated in `buffer`, up to the first short one."""

def scatter_ranges(path: str, starts: Int64s, lengths: Int64s, offsets: Int64s, buffer: memoryview) -> Status:
    """`gather_ranges` of ranges that differ in length: range i goes to offsets[i] of the buffer."""

def read_many(
    path_of: Callable[[str], str | None],
    keys: list[str],
    starts: list[int],
    lengths: list[int],
    etags: list[str | None],
    offsets: Sequence[int],
    buffer: memoryview,
) -> Sequence[int] | None:
    """Read range i of file keys[i] to offsets[i] of the buffer; the indices of the ranges that were not read, None if all were."""

def cut(buffer: memoryview, lengths: list[int]) -> list[bytes]:
    """The parts of a buffer, of these lengths."""

def fill_part(
    memory: NDArray[np.uint8],
    rows: Int64s,
    block: int,
    hashes: NDArray[np.uint64],
    is_hashed: NDArray[np.bool_],
    address: int,
) -> float | None:
    """See `native.fill_part`; None, and nothing done, where the CPU has no carry-less multiplication."""

# ---------------------------------------------------------------------------------------------- samples

def texts(data: bytes | memoryview, ends: Int64s, numbers: Int64s) -> list[str]:
    """The texts number `numbers` of the UTF-8 texts concatenated in `data`, which end at `ends`."""

def members(
    indices: Int64s,
    offsets: Int64s,
    num_members: int,
    starts: Int64s,
    sizes: Int64s,
    firsts: Int64s,
    keys: Sequence[str],
    etags: Sequence[str | None],
) -> tuple[list[str], list[int], list[int], list[str | None]]:
    """(keys, starts, sizes, etags) of the members at `offsets` of samples that all have `num_members`; `firsts` are the first
    samples of the archives."""

def tar_run(data: bytearray, offset: int, end: int, size: int) -> tuple[bytes, bytes, bytes, int]:
    """(names, starts, sizes, next offset) of the plain members in a part of a tar, up to the first that is not plain."""

def group_names(names: bytes, num: int) -> Any:
    """The samples that a tar's members make, whose names each end with a NUL; None where they are to be grouped one by one."""

def whole_jpeg_size(data: memoryview) -> tuple[int, int] | None:
    """(height, width) of a JPEG of 8 bits with 1 or 3 channels that is a chain of segments up to its scan, and has its end
    marker; None for all others.

    DALI 2.4.0 may crash some time after it was given a file whose segments are not contiguous; damage inside segments or in
    the scan it only refuses. Decoders on a GPU fill in a missing end without an error.
    """

def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of contiguous bytes."""

def parse_example(data: bytes | memoryview, wanted: Container[str] | None) -> dict[str, Any]:
    """The features of a serialised tf.train.Example (`wanted`: only those of these names): a list of bytes, ("f", bytearray) of
    float32 or ("q", bytearray) of int64, little-endian. Features without any kind are left out, and fields that are not known.
    Raises ValueError for what is none, or not whole."""

# ------------------------------------------------------------------------------------------------ order

def permute(values: Int64s, sizes: Int64s, a: Int64s, b: Int64s, keys: NDArray[np.uint64]) -> None:
    """Replace positions by their images, in place; see `sampling.permutation`. `sizes`, `a`, `b` and `keys` have one number per
    position, or one for all."""

def interleave(lags: Int64s, weights: Int64s, sources: Int64s, places: Int64s) -> None:
    """Fill `sources` with whose turn it is, turn by turn, and `places` with the number of its turns before; see
    `sampling.interleaving`. `lags` are those before the first turn, and afterwards those after the last."""

def interleave_lengths(
    lags: Int64s, weights: Int64s, lengths: Int64s, nexts: Int64s, ends: Int64s, rows: Int64s
) -> int:
    """`interleave` with turns of unequal length; see `sampling.token_mixture`. Source m has the turns of the lengths
    [nexts[m], ends[m]). Fills `rows` with the numbers of the lengths that come next, until it is full or a source has no length
    left, and returns how many; leaves `lags` and `nexts` as they are then."""

# ----------------------------------------------------------------------------------------------- packing

def best_fit(sizes: Int64s, capacity: int, bounds: Int64s, bins: Int64s, counts: Int64s) -> None:
    """Packs sizes of 0 to `capacity`, window by window, [bounds[w], bounds[w + 1]), into bins: the largest first, each into the
    bin with the least space that is enough, the newest of several. bins[i] becomes the bin in its window, -1 for a size of 0;
    counts[w] the number of bins of the window."""

def mark_documents(
    lengths: Int64s,
    firsts: Int64s,
    length: int,
    positions: NDArray[Any],
    documents: NDArray[Any],
    tokens: NDArray[Any],
    begin: int,
    starts: NDArray[np.int32],
    ends: Int64s,
) -> None:
    """Fills int32 [bins, length] of the place of every token in its document, and of its document's number in the bin, -1
    behind the last, where `tokens` are set to 0; a field of no bytes is not wanted. The documents of bin b are those from
    firsts[b] to firsts[b + 1]. `starts`, int32 [documents + bins], gets where documents and paddings begin when the bins lie
    end to end, the first at `begin`; ends[b] where those of bin b end."""

def take_pieces(
    samples: Int64s,
    firsts: Int64s,
    lengths: Int64s,
    places: Int64s,
    bounds: Int64s,
    sequences: Int64s,
    length: int,
) -> bytearray:
    """The pieces of some sequences, those of sequence i from bounds[i] to bounds[i + 1]; `places` are those in sequences that
    lie end to end. Returns the bytes of int64: the same four columns of the pieces taken, and their bounds."""

# ------------------------------------------------------------------------------------------------ pixels

def write_planes(slots: NDArray[np.uint8], slot: int, pixels: Pixels) -> None:
    """`native.write_planes` of packed RGB."""

def write_normalized(
    slots: NDArray[np.float32],
    first: int,
    images: list[Pixels | None],
    scale: tuple[float, ...],
    shift: tuple[float, ...],
) -> None:
    """`native.write_normalized` of packed RGB."""

def resample(jobs: list[tuple[Pixels, Pixels, tuple[float, float, float, float] | None, bool]]) -> bool:
    """Resize RGB pixels, or a part (top, left, height, width) of them, bilinearly: (target, pixels, part, antialias) each, both
    packed with rows that run forwards. False, and nothing done, on a CPU without AVX2."""

# ------------------------------------------------------------------------------------------------ clocks

def delayed() -> float:
    """Seconds that the calling thread was runnable without a CPU, as Linux counts them; 0 if it does not."""

def gil_wait(sleep_s: float) -> float:
    """Seconds that this thread waited for the GIL after it had slept."""

def wait_to_sample(sleep_s: float, thread: int, stat_file: int, signal: int) -> bool:
    """Sleep; then send `signal` (0: none) to the thread with this ident if its `stat_file` of /proc says that it runs, and wait
    for the GIL. True if that thread has not called `take_sample` by then, and the caller is to sample it."""

def take_sample() -> bool:
    """True if a sample is due; it is then the caller's."""

class StateClock:
    """One worker's time by state, in seconds. Only the worker itself enters states; any thread may read."""

    num_stages: int
    open_state: int
    since_s: float
    trace: Any
    item: Any
    def __init__(
        self,
        num_stages: int,
        num_states: int,
        clock: Callable[[], float],
        *,
        first_state: int,
        since_s: float,
        slow_items: object,
    ) -> None: ...
    def enter(self, state: int) -> float:
        """End the open interval and begin `state`; returns the time."""

    def served(self, stage: int, num_items: int, num_bytes: int, chunk: object = None) -> None:
        """Count the items of the open interval, in `stage`: a `chunk`, or without one a whole batch."""

    def failed(self, stage: int, count: int) -> None:
        """Count samples that failed in `stage`."""

    @classmethod
    def summed(cls, clocks: list[Self], now: float) -> tuple[list[float], list[Any]]:
        """Sums over these clocks: seconds by state up to `now`, with the open interval, and the totals of every stage, in the
        order of `ClockTotals`."""

    def timeline(self, start_s: float, end_s: float) -> list[tuple[int, float, float]]:
        """(state, since, until) of every interval within [start_s, end_s), latest first, as far back as the marks go."""
