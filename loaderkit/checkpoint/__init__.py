"""Restores tensors from checkpoints on the engine, on one rank or several; the function is `loaderkit.restore`.

url ─> discovery.open ──> restore.requests ─> transfer.layout ─> transfer.plan ──> engine: read, place ─> tensors
       TensorEntry, Shard ReadRequest         ByteSpan           CoalescedRead
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loaderkit.checkpoint.discovery.latest import latest
    from loaderkit.checkpoint.discovery.manifest import write_manifest
    from loaderkit.checkpoint.restore.dcp_reader import StreamReader

__all__ = ["StreamReader", "latest", "write_manifest"]

_HOMES = {"StreamReader": "restore.dcp_reader", "latest": "discovery.latest", "write_manifest": "discovery.manifest"}


def __getattr__(name: str) -> Any:
    """Import on first use: the reader imports torch.distributed.checkpoint."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'loaderkit.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"loaderkit.checkpoint.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
