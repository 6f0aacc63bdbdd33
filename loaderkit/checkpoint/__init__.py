"""Restoring: the same engine fills tensors from byte ranges of a checkpoint.

    url ─> opening: which tensors, where ─> laying: byte ranges ─> plan: destinations ─> prefetch.Engine ─> tensors

`loaderkit.restore` is in `restoring`; this package gives `latest`, `write_manifest` and `StreamReader`.
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
    """Import on first use: the reader brings torch.distributed with it."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'loaderkit.checkpoint' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"loaderkit.checkpoint.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
