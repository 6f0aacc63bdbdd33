"""Recognises the formats of pictures by their first bytes."""

from __future__ import annotations

import re
from typing import Literal, get_args

Format = Literal["jpeg", "png", "webp", "gif", "bmp", "tiff", "ppm", "avif", "jpeg2000"]
"""A format that may be opened, by Pillow's name in lower case. "jpeg" includes MPO, of which the first picture is read."""

FORMATS: tuple[Format, ...] = get_args(Format)

_BEGINNINGS: dict[str, re.Pattern[bytes]] = {
    name: re.compile(pattern, re.DOTALL)
    for name, pattern in {
        "jpeg": rb"\xff\xd8",
        "png": rb"\x89PNG",
        "webp": rb"RIFF....WEBP",
        "gif": rb"GIF8",
        "bmp": rb"BM.{4}\0{4}",
        "tiff": rb"II[*+]\0|MM\0[*+]",
        "ppm": rb"P[1-7Ff]\s+[\d#]",
        "avif": rb"....ftypavi[fs]",
        "jpeg2000": rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  ",
        "PostScript": rb"%!PS|\xc5\xd0\xd3\xc6",
        "PDF": rb"%PDF",
        "SVG or XML": rb"\s*<(\?xml|svg)",
        "a web page": rb"\s*<(!doctype|!DOCTYPE|html|HTML)",
        "HEIC": rb"....ftyp(hei|hev|mif1)",
        "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
        "a Photoshop file": rb"8BPS",
        "an icon": rb"\0\0[\x01\x02]\0",
        "a ZIP archive": rb"PK\x03\x04",
        "gzip": rb"\x1f\x8b",
    }.items()
}
_EXTENSIONS = {name: name for name in FORMATS} | {"jpeg": "jpg", "tiff": "tif", "jpeg2000": "jp2"}


def picture_extension(data: memoryview) -> str | None:
    """The usual extension for a picture that begins like this; None if it is no picture, or in a format that is not
    opened."""
    return _EXTENSIONS.get(looks_like(data) or "")


def looks_like(data: memoryview) -> str | None:
    """What a file with these first bytes is, or None if that is not known."""
    head = bytes(data[:32])
    return next((name for name, pattern in _BEGINNINGS.items() if pattern.match(head)), None)
