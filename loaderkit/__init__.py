"""loaderkit: a data-loading pipeline and prefetcher for PyTorch that says why the GPU waits.

loader = loaderkit.build("pipeline.yaml")
with loader:
    for batch in loader:
        images, labels = batch["image"], batch["label"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit._internal.version import __version__

if TYPE_CHECKING:
    from loaderkit.checkpoint.restore.api import restore
    from loaderkit.pipeline.config.builder import Pipeline
    from loaderkit.pipeline.loader import Loader, build

__all__ = ["Loader", "Pipeline", "__version__", "build", "checkpoint", "errors", "restore"]

_HOMES = {
    "Loader": "loaderkit.pipeline.loader",
    "Pipeline": "loaderkit.pipeline.config.builder",
    "build": "loaderkit.pipeline.loader",
    "restore": "loaderkit.checkpoint.restore.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import loaderkit` alone must not cost the import of torch (a second or more)."""
    import importlib

    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in ("checkpoint", "errors"):
        found = importlib.import_module(f"loaderkit.{name}")
    else:
        raise AttributeError(f"module 'loaderkit' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
