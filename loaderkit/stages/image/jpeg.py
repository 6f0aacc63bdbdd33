"""JPEG files, as far as their segments go: what lies inside them is for decoders."""

from __future__ import annotations

_MARKER, _START_OF_IMAGE, _START_OF_SCAN, _END = 0xFF, 0xD8, 0xDA, b"\xff\xd9"
_WITHOUT_LENGTH = frozenset({0x00, 0x01, _MARKER, *range(0xD0, 0xDA)})
_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive
_OTHER_FRAMES = frozenset({0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)})


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


def jpeg_size(data: memoryview) -> tuple[int, int] | None:
    """(height, width) by the frame header of a baseline, extended or progressive JPEG of 8 bits, grey or of three colours;
    None for everything else. It takes 2 us, where a decoder that sets itself up for it takes 10."""
    if len(data) <= 4 or data[0] != _MARKER or data[1] != _START_OF_IMAGE:
        return None
    at = 2
    while len(data) - at > 9 and data[at] == _MARKER:
        marker = data[at + 1]
        if marker == _MARKER:  # a fill byte
            at += 1
            continue
        if marker in _FRAMES and data[at + 4] == 8:
            height, width = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            return (height, width) if height and width and data[at + 9] in (1, 3) else None
        if marker == _START_OF_SCAN or marker in _WITHOUT_LENGTH or marker in _FRAMES or marker in _OTHER_FRAMES:
            return None
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None
