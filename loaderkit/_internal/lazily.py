"""torch, or what stands for it where that is put off.

To import it takes longer than all else that a process which loads does before its first batch, and one that only reads,
decodes, crops and writes into slots needs nothing of it. There it is imported when something of it is first asked for;
everywhere else `torch` is the module itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch

__all__ = ["has_torch", "is_tensor", "put_torch_off", "torch"]


def __getattr__(name: str) -> Any:
    if name != "torch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    globals()[name] = torch
    return torch


class _Late:
    """Stands for torch until that is needed. What was asked for once is kept as an attribute."""

    def __init__(self, importer: Callable[[], ModuleType]) -> None:
        self._importing = threading.RLock()
        self._importer = importer
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # what Python asks every object for
            raise AttributeError(name)
        with self._importing:  # whoever comes second finds what the importer has set up behind the import
            module = self._module = self._module or self._importer()
        found = getattr(module, name)
        setattr(self, name, found)
        return found


def put_torch_off(importer: Callable[[], ModuleType]) -> None:
    """From now on let modules that are imported have torch when they need something of it, by `importer`, called once in the
    thread that does. Without effect where torch was imported before."""
    if not has_torch():
        globals()["torch"] = _Late(importer)


def has_torch() -> bool:
    """Whether torch has been imported, by whomever."""
    return "torch" in sys.modules


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor; there is none before torch is imported."""
    found = sys.modules.get("torch")
    return found is not None and isinstance(value, getattr(found, "Tensor", ()))
