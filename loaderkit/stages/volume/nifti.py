"""NIfTI (.nii, .nii.gz): reads the array of a scan from the bytes of the file, with the result that nibabel gives."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.errors import FormatError, MissingExtraError

_MOST_BYTES = 4 << 30
_HEADER_BYTES = 540  # of NIfTI-2, the longer one
_GZIP = b"\x1f\x8b"
_KINDS = "biuf"
_SLICE_BYTES = 1 << 16


def read_nifti(data: memoryview) -> NDArray[Any]:
    """The values of a scan, [x, y, z] or more dimensions, in the machine's byte order and C order.

    They have the file's dtype, or float32 where the header scales them (`scl_slope`, `scl_inter`). Raises FormatError for what
    is no NIfTI in one file, is cut, or would take more than 4 GiB; and MissingExtraError without nibabel.
    """
    try:
        from nibabel.nifti1 import Nifti1Header
        from nibabel.nifti2 import Nifti2Header
        from nibabel.spatialimages import HeaderDataError
        from nibabel.volumeutils import apply_read_scaling
        from nibabel.wrapstruct import WrapStructError
    except ImportError as error:
        raise MissingExtraError(f"NIfTI needs nibabel ({error}): pip install 'loaderkit[volumes]'") from error
    try:
        head = _unpacked(data, _HEADER_BYTES)
        is_second = 540 in (int.from_bytes(head[:4], "little"), int.from_bytes(head[:4], "big"))
        kind = Nifti2Header if is_second else Nifti1Header
        header = kind(head[: kind.sizeof_hdr], check=False)  # a check mends what is damaged, and only logs it
        magic, size = bytes(header["magic"].item()), int(header["sizeof_hdr"])
        if size != kind.sizeof_hdr or magic.rstrip(b"\0")[:3] != kind.single_magic[:3]:
            raise ValueError(f"a header of {size} bytes and kind {magic!r}, where {kind.single_magic!r} is read")
        dtype, shape, start = header.get_data_dtype(), header.get_data_shape(), int(header.get_data_offset())
        slope, inter = header.get_slope_inter()
        if start < kind.sizeof_hdr + 4:
            raise ValueError(f"its header says that values begin at byte {start}, inside of it")
        num_bytes = _checked_size(dtype, shape, start)
        whole = _unpacked(data, start + num_bytes, checks_end=True)
    except (HeaderDataError, WrapStructError, KeyError, ValueError, OverflowError, zlib.error) as error:
        raise FormatError(f"no NIfTI, or a damaged one: {error}") from error
    if len(whole) < start + num_bytes:
        raise FormatError(f"it has {len(whole)} bytes where its header says {start + num_bytes}: it is cut")
    values = np.frombuffer(whole, dtype, num_bytes // dtype.itemsize, start).reshape(shape, order="F")
    if (slope, inter) in ((None, None), (1.0, 0.0)):
        return np.array(values, dtype.newbyteorder("="), order="C")
    try:
        with np.errstate(over="raise", invalid="raise"):
            return np.array(apply_read_scaling(values, slope, inter), np.float32, order="C")
    except FloatingPointError as error:
        raise FormatError(f"its values, scaled by {slope} and {inter}, are beyond float32: {error}") from None


def _checked_size(dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> int:
    """The bytes of the values. Raises ValueError."""
    if dtype.kind not in _KINDS or dtype.itemsize > 8:
        raise ValueError(f"its values are {dtype}, which no tensor can hold")
    num_bytes = dtype.itemsize * math.prod(map(int, shape))
    if not shape or min(shape) < 1 or num_bytes > _MOST_BYTES or not 0 <= start <= _MOST_BYTES:
        raise ValueError(
            f"its header says {list(shape)} values of {dtype} from byte {start} on; at most 4 GiB are read"
        )
    return num_bytes


def _unpacked(data: memoryview, num: int, *, checks_end: bool = False) -> bytes:
    """The first `num` bytes of a file's content, decompressed if it is compressed; fewer if the content is shorter.
    With `checks_end` the rest is read as well, since only the end shows whether the bytes are right."""
    if data[:2] != _GZIP:
        return bytes(data[:num])
    parts, left, packed = [], num, bytes(data)
    while packed and (left or checks_end):  # a file may be several gzip members
        unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while packed and not unpacker.eof and (left or checks_end):
            part = unpacker.decompress(packed, left or _SLICE_BYTES)
            packed = unpacker.unconsumed_tail
            if left:
                parts.append(part)
                left -= len(part)
        if checks_end and not unpacker.eof:
            raise ValueError(f"it is cut after {num - left} of {num} bytes")
        packed = unpacker.unused_data.lstrip(b"\0")  # padding, as of tapes
    return b"".join(parts)
