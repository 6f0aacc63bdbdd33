"""loaderkit as it is where it was installed without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isfunction
from typing import Any
from unittest import mock

from loaderkit import native
from loaderkit.native import fallback, fallback_serial

TWINS: dict[str, Any] = {
    name: twin
    for name, twin in {**vars(fallback), **vars(fallback_serial)}.items()
    if isfunction(twin) and hasattr(native, name)
}


@contextmanager
def without_kernels() -> Iterator[None]:
    """Every kernel is its twin of `fallback`; what decodes pieces of JPEGs, a module of its own, stays."""
    with mock.patch.multiple(native, HAS_KERNELS=False, CAN_RESAMPLE=False, **TWINS):
        yield
