"""The C module `loaderkit._kernels`, or None where there was no compiler when loaderkit was installed."""

from __future__ import annotations

import importlib
from typing import Any


def _load() -> Any:
    try:
        return importlib.import_module("loaderkit._kernels")
    except ImportError:
        return None


kernels: Any = _load()
