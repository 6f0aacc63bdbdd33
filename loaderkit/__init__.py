"""loaderkit: a data-loading pipeline and prefetcher for PyTorch that says why the GPU waits.

loader = loaderkit.build("pipeline.yaml")
with loader:
    for batch in loader:
        images, labels = batch["image"], batch["label"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderkit.about import __version__

if TYPE_CHECKING:
    from loaderkit import checkpoint, errors
    from loaderkit.checkpoint.restoring import restore
    from loaderkit.loader import Loader, build
    from loaderkit.pipeline import Pipeline

__all__ = ["Loader", "Pipeline", "__version__", "build", "checkpoint", "errors", "restore"]

_HOMES = {
    "Loader": "loaderkit.loader",
    "Pipeline": "loaderkit.pipeline",
    "build": "loaderkit.loader",
    "restore": "loaderkit.checkpoint.restoring",
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
