"""Runs stages on work items, in order and within a memory budget, and measures which part waits for which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.engine.contracts import Executor, Plan
    from loaderkit.engine.work import Chunk, Stage, WorkItem

__all__ = ["Chunk", "Executor", "Plan", "Stage", "WorkItem"]
__getattr__ = public_names(
    __name__,
    {
        "Chunk": "loaderkit.engine.work",
        "Executor": "loaderkit.engine.contracts",
        "Plan": "loaderkit.engine.contracts",
        "Stage": "loaderkit.engine.work",
        "WorkItem": "loaderkit.engine.work",
    },
)
