"""loaderkit: a data-loading pipeline and prefetcher for PyTorch that says why the GPU waits.

loader = loaderkit.build("pipeline.yaml")
with loader:
    for batch in loader:
        images, labels = batch["image"], batch["label"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit import checkpoint, errors, metrics
from loaderkit._internal.imports import public_names
from loaderkit._internal.version import __version__

if TYPE_CHECKING:
    from loaderkit import extend
    from loaderkit.checkpoint.manager.manager import CheckpointManager
    from loaderkit.checkpoint.restore.api import restore
    from loaderkit.joint_start import start
    from loaderkit.loader import Loader, build
    from loaderkit.pipeline.config.builder import Pipeline
    from loaderkit.profile.watched.watch import watch

__all__ = [
    "CheckpointManager",
    "Loader",
    "Pipeline",
    "__version__",
    "build",
    "checkpoint",
    "errors",
    "extend",
    "metrics",
    "restore",
    "start",
    "watch",
]
# On first use: `import loaderkit` alone must not cost the import of torch (a second or more).
__getattr__ = public_names(
    __name__,
    {
        "CheckpointManager": "loaderkit.checkpoint.manager.manager",
        "Loader": "loaderkit.loader",
        "Pipeline": "loaderkit.pipeline.config.builder",
        "build": "loaderkit.loader",
        "extend": "loaderkit.extend",
        "restore": "loaderkit.checkpoint.restore.api",
        "start": "loaderkit.joint_start",
        "watch": "loaderkit.profile.watched.watch",
    },
)


def __dir__() -> list[str]:
    return __all__
