"""Reads the messages of an Arrow file (IPC: streams, as `datasets.save_to_disk` writes them, and files); of the file
only the messages' metadata is read.

Arrow finds the buffers itself: it is given memory as large as the file, of which only the metadata of the messages is filled
in. It copies no buffer, so the address of one says where in the file it lies; the pages in between are never touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import FormatError

_MAGIC = b"ARROW1\x00\x00"  # of files; streams begin with their first message
_CONTINUES = b"\xff\xff\xff\xff"
_MOST_METADATA = 256 << 20  # bytes, of one message: a schema of thousands of columns takes 1 MB


class ArrowMessages:
    """Memory as large as the file, in which the same byte has the same place, and which holds what was read of it."""

    def __init__(self, pa: Any, connector: Connector, info: ObjectInfo) -> None:
        self.pa, self._connector, self._info = pa, connector, info
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, info.size, flags=flags)
        self._view = memoryview(self._memory)
        self._buffer = pa.py_buffer(self._memory)

    def messages(self) -> Iterator[tuple[Any, int, int]]:
        """The schema, then the record batches, their bodies not read, each with where it begins and ends in the file.

        Raises FormatError for other messages, and what pyarrow raises.
        """
        begin = self.read(0, min(len(_MAGIC), self._info.size))
        position = len(_MAGIC) if begin == _MAGIC else 0
        has_schema = False
        while (found := self._message(position)) is not None:
            message, end = found
            if message.type == "schema":
                has_schema = True
            elif not has_schema:
                raise FormatError("it does not begin with a schema, as Arrow files do")
            elif message.type != "record batch":
                raise FormatError(f"it has a message of the kind {message.type!r}, which cannot be read by ranges")
            yield message, position, end
            position = end

    def read(self, start: int, length: int) -> bytes:
        """Bytes of the file, which also get their place in the memory."""
        if length < 0 or start + length > self._info.size:
            raise FormatError(f"it ends at byte {self._info.size}, within its metadata: it is truncated")
        part = self._view[start : start + length]
        self._connector.read_into(self._info.key, start, part, etag=self._info.etag)
        return bytes(part)

    def _message(self, position: int) -> tuple[Any, int] | None:
        """The message that begins there, its body not read, and where the next one begins; None at the end."""
        head = self.read(position, 8)
        num_bytes = int.from_bytes(head[4:], "little", signed=True)
        if head[:4] != _CONTINUES:
            raise FormatError(
                f"no message begins at byte {position}: it is damaged, or written by a version before 0.15"
            )
        if num_bytes == 0:
            return None
        if not 0 < num_bytes <= _MOST_METADATA:
            raise FormatError(f"the message at byte {position} has metadata of {num_bytes} bytes: it is damaged")
        self.read(position + 8, num_bytes)
        reader = self.pa.BufferReader(self._buffer)
        reader.seek(position)
        return self.pa.ipc.read_message(reader), reader.tell()

    def holds(self, array: Any) -> bool:
        """True if all buffers of an array lie in the file, which compressed ones do not."""
        first, end = self._buffer.address, self._buffer.address + self._info.size
        return all(
            first <= buffer.address and buffer.address + buffer.size <= end for buffer in array.buffers() if buffer
        )

    def place_of(self, buffer: Any, num_bytes: int) -> int:
        """The first byte of a buffer in the file, which has at least `num_bytes`. Raises FormatError."""
        place = 0 if buffer is None else buffer.address - self._buffer.address
        is_inside = buffer is not None and 0 <= place <= self._info.size - buffer.size
        if not is_inside and num_bytes:
            raise FormatError(
                "its record batches are compressed, so that lists are no ranges of it: write it without that"
            )
        if num_bytes > (0 if buffer is None else buffer.size):
            raise FormatError(
                f"a buffer of its lists has {buffer.size} bytes, and they take {num_bytes}: it is damaged"
            )
        return place
