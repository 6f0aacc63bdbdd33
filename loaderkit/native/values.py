"""What all values of a list have in common."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from loaderkit.native import kernels


def type_of_all(values: list[Any]) -> type | None:
    """The type of all values; None where they are of several, or there are none."""
    if kernels is not None:
        found: type | None = kernels.shared(values)
        return found
    types = {*map(type, values)}
    return types.pop() if len(types) == 1 else None


def all_have_dtype(values: list[Any], dtype: Any) -> bool:
    """Whether there are values, and all are tensors, or arrays, of this type."""
    if kernels is not None:
        found = kernels.shared(values, "dtype")
        return found is not None and bool(found == dtype)  # None == np.dtype(np.float64), says NumPy
    return {*map(attrgetter("dtype"), values)} == {dtype}
