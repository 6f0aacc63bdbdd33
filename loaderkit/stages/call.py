"""`call`: any function of the user's, on a sample before `batch`, on a batch after it.

The function gets a dict (images as torch uint8 [C, H, W], and `__key__`), the arguments of `args`, and, if its signature
has a parameter `rng`, a `numpy.random.Generator` that depends on (seed, epoch, sample, stage name) alone. It changes the
dict in place or returns another one.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pydantic import Field, field_serializer, field_validator

from loaderkit._internal.forks import ending_forks
from loaderkit._internal.settings import Duration
from loaderkit.sources.base import Sample
from loaderkit.stages.base import Encoded, Image, StageArgs
from loaderkit.stages.values import as_image, to_tensor

_KEY = "__key__"


class CallArgs(StageArgs):
    """Call a function of your own."""

    function: str | Callable[..., Any] = Field(
        description='"package.module:function", or in Python the function itself'
    )
    args: dict[str, Any] = Field({}, description="keyword arguments for every call")
    timeout: Duration | None = Field(
        None, description="the longest a call may take; then its sample (or batch) has failed, and it is left behind"
    )

    @field_validator("function")
    @classmethod
    def _is_path(cls, value: str | Callable[..., Any]) -> str | Callable[..., Any]:
        if isinstance(value, str) and not all(value.partition(":")[::2]):
            raise ValueError(f'"package.module:function", not {value!r}')
        return value

    @field_serializer("function")
    def _to_path(self, value: str | Callable[..., Any]) -> str:
        if isinstance(value, str):
            return value
        path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        try:
            found: Any = load_function(path)
        except (ImportError, AttributeError, ValueError):
            found = None
        if found is not value:
            raise ValueError(f"{value!r} cannot be found again by name: define it at the top level of a module")
        return path


def load_function(path: str) -> Callable[..., Any]:
    """The callable at "package.module:name". Raises ImportError, AttributeError or ValueError."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{path} is {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def bind(args: CallArgs) -> tuple[Callable[..., Any], bool]:
    """The function with its arguments, and whether it wants `rng`."""
    function = load_function(args.function) if isinstance(args.function, str) else args.function
    try:
        wants_rng = "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        wants_rng = False

    call = ending_forks(function)

    def bound(value: Any, rng: np.random.Generator | None) -> Any:
        return call(value, rng=rng, **args.args) if wants_rng else call(value, **args.args)

    return bound, wants_rng


def call_on_sample(function: Callable[..., Any], sample: Sample, key: str, rng: np.random.Generator | None) -> Sample:
    """The sample after the call. Images become tensors for it, and images again after it if they still are."""
    images = {name: value for name, value in sample.items() if type(value) is Image}
    # Encoded bytes lie in memory that is used again: what a user may keep is a copy.
    encoded = {name: (bytes(value.data), value) for name, value in sample.items() if type(value) is Encoded}
    given: Sample = {
        **sample,
        **{name: to_tensor(image) for name, image in images.items()},
        **{name: data for name, (data, _) in encoded.items()},
        _KEY: key,
    }
    returned = function(given, rng)
    result = _checked(given if returned is None else returned)
    result.pop(_KEY, None)
    for name, (data, original) in encoded.items():
        if result.get(name) is data:
            result[name] = original
    for name, image in images.items():
        value = result.get(name)
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 3:
            after = as_image(value)
            if after is not None:
                result[name] = after._replace(mask=image.mask)
    return result


def call_on_batch(
    function: Callable[..., Any], batch: dict[str, Any], rng: np.random.Generator | None
) -> dict[str, Any]:
    """The batch after the call."""
    returned = function(batch, rng)
    return _checked(batch if returned is None else returned)


def _checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(
            f"the function returned {type(value).__name__}; it must return a dict, or None to keep the one given"
        )
    return value
