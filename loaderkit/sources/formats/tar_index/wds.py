"""The text index that NVIDIA DALI's `wds2idx` writes beside a WebDataset archive, version 1.2.

The first line is "v1.2 <number of samples>"; then comes a line for each sample: for each of its members the extension,
the first byte, the size and the name, all separated by blanks. Consecutive members whose names are equal up to the
first dot of the base name are one sample.
"""

from __future__ import annotations

import numpy as np

from loaderkit.errors import FormatError
from loaderkit.sources.formats.tar_index.index import TarIndex, sample_key_and_extension


def wds_index_key(key: str) -> str:
    """The key of the index that belongs to the archive `key`: "a/shard-0.tar" -> "a/shard-0.idx"."""
    dot = key.find(".", key.rfind("/") + 2)
    return (key[:dot] if dot >= 0 else key) + ".idx"


def write_wds_index(index: TarIndex) -> str:
    """The text for an archive. Hidden files and members without an extension are left out, as by `wds2idx`.

    Raises `FormatError` naming the member whose name contains white space: the format cannot hold it.
    """
    lines: list[str] = []
    last_key = None
    for name, start, size in index:
        parts = sample_key_and_extension(name)
        if parts is None:
            continue
        if len(name.encode("utf-8", "surrogateescape").split()) != 1 or name[0].isspace() or name[-1].isspace():
            raise FormatError(
                f"the index format v1.2 cannot hold the member {name!r}: its fields are separated by white space; "
                "rename it, or write no index file (loaderkit keeps its own)"
            )
        group = f"{parts[1]} {start} {size} {name}"
        if parts[0] == last_key:
            lines[-1] += " " + group
        else:
            lines.append(group)
        last_key = parts[0]
    return "\n".join([f"v1.2 {len(lines)}", *lines]) + "\n"


def parse_wds_index(text: str, where: str) -> TarIndex | None:
    """The members listed in an index; `where` names it in messages.

    None for the versions 1.0 and 1.1, which have no names. Raises `FormatError` with the line for any other deviation from
    the format of `wds2idx`.
    """
    # Only ASCII white space separates, as in DALI: a name may contain any other.
    lines = text.encode("utf-8", "surrogateescape").split(b"\n")
    head = lines[0].split()
    if len(head) == 2 and head[0] in (b"v1.0", b"v1.1"):
        return None
    if len(head) != 2 or head[0] != b"v1.2" or not head[1].isdigit():
        raise FormatError(f"{where}, line 1: 'v1.2 <number of samples>' expected, not {_shown(lines[0])}")
    if lines[-1].strip():
        raise FormatError(f"{where}, line {len(lines)}: the last line is incomplete; the file is truncated")
    if len(lines) - 2 != int(head[1][:20]):
        raise FormatError(f"{where}, line 1: it promises {int(head[1][:20])} samples, but {len(lines) - 2} follow")
    starts: list[int] = []
    sizes: list[int] = []
    names: list[bytes] = []
    for number, line in enumerate(lines[1:-1], 2):
        fields = line.split()
        if not fields or len(fields) % 4:
            raise FormatError(f"{where}, line {number}: groups of extension, offset, size and name expected")
        try:
            starts += map(int, fields[1::4])
            sizes += map(int, fields[2::4])
        except ValueError as error:
            raise FormatError(f"{where}, line {number}: an offset or size is no number ({error})") from None
        names += fields[3::4]
        for extension, name in zip(fields[::4], fields[3::4], strict=True):
            # `wds2idx` writes the whole name as the extension of a member that has none.
            if name.rpartition(b"/")[2].partition(b".")[2] != extension and name != extension:
                raise FormatError(f"{where}, line {number}: {_shown(name)} has not the extension {_shown(extension)}")
    try:
        packed = b"".join(name + b"\0" for name in names)
        index = TarIndex(np.array(starts, np.int64), np.array(sizes, np.int64), packed)
    except (ValueError, OverflowError) as error:
        raise FormatError(f"{where}: an offset or size is out of range, or a name contains a NUL ({error})") from None
    if np.any(index.sizes < 0) or np.any(index.starts < 512) or np.any(index.starts % 512):
        raise FormatError(f"{where}: an offset that no member of a tar can have, or a negative size")
    return index


def _shown(text: bytes) -> str:
    return repr(text[:200].decode("utf-8", "surrogateescape"))
