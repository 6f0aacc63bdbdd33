"""JPEG files, as far as their segments go: what lies inside them is for decoders."""

from __future__ import annotations

_MARKER, _START_OF_SCAN, _END = 0xFF, 0xDA, b"\xff\xd9"
_WITHOUT_LENGTH = frozenset({0x00, 0x01, _MARKER, *range(0xD0, 0xDA)})


def is_well_formed(data: memoryview) -> bool:
    """Whether a JPEG is a chain of segments up to its scan, and has its end.

    DALI 2.4.0 may crash some time after it was given one whose segments do not follow one another; what is wrong inside
    segments or in the scan it only refuses. And decoders on a GPU fill up what is missing at the end and say nothing.
    """
    if bytes(data[:2]) != b"\xff\xd8":
        return False
    at = 2
    while at + 4 <= len(data) and data[at] == _MARKER and data[at + 1] not in _WITHOUT_LENGTH:
        if data[at + 1] == _START_OF_SCAN:
            return _END in bytes(data[max(at, len(data) - 4096) :])
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2:
            return False
        at += 2 + length
    return False
