"""What `_jpeg` says of JPEGs, by simplejpeg where that module could not be built."""

from __future__ import annotations

import simplejpeg


def is_cut(data: memoryview) -> bool:
    """True for a JPEG that was truncated, even if an end marker or filler was appended.

    If a file has several faults, simplejpeg names only the first, so a cut that is not the first is missed; `_jpeg`
    finds all.
    """
    for mode in ("GRAY", "CMYK"):  # all but four-channel images convert to grey
        try:
            simplejpeg.decode_jpeg(data, mode)
        except Exception as error:  # some chroma subsamplings are unknown
            if "premature end" in str(error).lower():
                return True
        else:
            return False
    return False
