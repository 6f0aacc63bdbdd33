"""Indexes of tar archives: the ranges of the members, without reading the members.

load_index   an index beside the archive (wds.py), or a copy on this machine (store.py), or else
scan_tar     the archive's headers, read through a connector by ranges (scan.py)
TarIndex     the result (index.py)
"""

from loaderkit.sources.formats.tar_index.index import TarIndex
from loaderkit.sources.formats.tar_index.scan import scan_tar
from loaderkit.sources.formats.tar_index.store import load_index
from loaderkit.sources.formats.tar_index.wds import parse_wds_index, wds_index_key, write_wds_index

__all__ = [
    "TarIndex",
    "load_index",
    "parse_wds_index",
    "scan_tar",
    "wds_index_key",
    "write_wds_index",
]
