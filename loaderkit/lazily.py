"""torch, imported when something of it is first asked for.

To import it takes longer than all else that a process which loads does before its first batch, and one that only reads,
decodes, crops and writes into slots needs nothing of it. Where torch was imported before, as in a training program, `torch`
is the module itself.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch

__all__ = ["has_torch", "is_tensor", "load_torch_with", "torch"]


class _Late:
    """Stands for torch until that is needed. What was asked for once is kept as an attribute."""

    def __init__(self) -> None:
        self._importing = threading.RLock()
        self._importer: Callable[[], ModuleType] = lambda: importlib.import_module("torch")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with self._importing:  # whoever comes second finds what the importer has set up behind the import
            module = self._importer()
            self._importer = lambda: module
        found = getattr(module, name)
        setattr(self, name, found)
        return found


_late = _Late()
if not TYPE_CHECKING:
    torch = sys.modules.get("torch", _late)


def load_torch_with(importer: Callable[[], ModuleType]) -> None:
    """Let `importer` import torch, once, in the thread that first needs something of it."""
    _late._importer = importer


def has_torch() -> bool:
    """Whether torch has been imported, by whomever."""
    return "torch" in sys.modules


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor; there is none before torch is imported."""
    found = sys.modules.get("torch")
    return found is not None and isinstance(value, getattr(found, "Tensor", ()))
