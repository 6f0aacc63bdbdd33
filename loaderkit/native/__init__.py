"""The C modules: None where there was no compiler when loaderkit was installed, or, for `jpeg`, no libjpeg-turbo."""

from __future__ import annotations

import importlib
from typing import Any


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


kernels: Any = _load("loaderkit.native._kernels")
jpeg: Any = _load("loaderkit.native._jpeg")
