"""The C extension behind one door: every kernel as a function, in C or, without a compiler, its twin from `fallback`.

Call kernels as `native.NAME(...)`. Where C changes the algorithm and not only the speed, a constant says what there is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from loaderkit.native import fallback

P = ParamSpec("P")
R = TypeVar("R")


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_kernels: Any = _load("loaderkit.native._kernels")
_jpeg: Any = _load("loaderkit.native._jpeg")

HAS_KERNELS: bool = _kernels is not None
"""False where there was no compiler: then `Ledger`, `gil_wait`, `read_hashed` and `resample` are missing."""
HAS_JPEG: bool = _jpeg is not None
"""False without libjpeg-turbo's headers: then JPEGs are decoded whole, and `decode_pieces` is missing."""
CAN_RESAMPLE: bool = HAS_KERNELS and _kernels.resample([])
"""True on a CPU with AVX2: then `resample` does what else torch does, within a level of it."""


def _offered(twin: Callable[P, R], module: Any = _kernels) -> Callable[P, R]:
    """The kernel in C that is called like its twin; without one, the twin."""
    kernel: Callable[P, R] = getattr(module, twin.__name__, twin)
    return kernel


cut = _offered(fallback.cut)
delayed = _offered(fallback.delayed)
gather_ranges = _offered(fallback.gather_ranges)
group_names = _offered(fallback.group_names)
members = _offered(fallback.members)
permute = _offered(fallback.permute)
read_many = _offered(fallback.read_many)
read_range = _offered(fallback.read_range)
tar_run = _offered(fallback.tar_run)
texts = _offered(fallback.texts)
write_normalized = _offered(fallback.write_normalized)
write_planes = _offered(fallback.write_planes)
is_cut = _offered(fallback.is_cut, _jpeg)

# These have no twin: see the constants above.
Ledger: Any = getattr(_kernels, "Ledger", None)
gil_wait: Any = getattr(_kernels, "gil_wait", None)
read_hashed: Any = getattr(_kernels, "read_hashed", None)
resample: Any = getattr(_kernels, "resample", None)
decode_pieces: Any = getattr(_jpeg, "decode", None)
SPARE_COLUMNS: int = getattr(_jpeg, "BESIDE", 0)
"""By how many columns `decode_pieces` may write more than a piece has."""
