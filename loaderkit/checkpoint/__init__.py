"""Restores tensors from checkpoints on the engine, on one rank or several (`loaderkit.restore`), and writes checkpoints.

url ─> discovery.open ──────────> restore.requests ─> transfer.layout ─> transfer.plan ──> engine: read, place ─> tensors
       TensorEntry, TensorShard   ReadRequest         ByteSpan           CoalescedRead

dcp.save ─> save.dcp_writer ─> save.file_plan ─> save.engine: staged, hashed, written in parts ─> save.commit
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.checkpoint.discovery.latest import latest
    from loaderkit.checkpoint.discovery.manifest import write_manifest
    from loaderkit.checkpoint.formats.blockwise import dequantize
    from loaderkit.checkpoint.manager.per_rank import PerRank, RngState
    from loaderkit.checkpoint.restore.dcp_reader import StreamReader
    from loaderkit.checkpoint.save.dcp_writer import StreamWriter

__all__ = ["PerRank", "RngState", "StreamReader", "StreamWriter", "dequantize", "latest", "write_manifest"]
__getattr__ = public_names(
    __name__,
    {
        "PerRank": "loaderkit.checkpoint.manager.per_rank",
        "RngState": "loaderkit.checkpoint.manager.per_rank",
        "StreamReader": "loaderkit.checkpoint.restore.dcp_reader",  # with torch.distributed.checkpoint
        "StreamWriter": "loaderkit.checkpoint.save.dcp_writer",
        "dequantize": "loaderkit.checkpoint.formats.blockwise",
        "latest": "loaderkit.checkpoint.discovery.latest",
        "write_manifest": "loaderkit.checkpoint.discovery.manifest",
    },
)


def __dir__() -> list[str]:
    return __all__
