"""`call`: a user's function, applied to samples before `batch` or to batches after it. `filter`: a user's function that
drops samples.

The function gets a dict (images as torch uint8 [C, H, W], and `__key__`), the arguments of `args`, and, if its signature
has a parameter `rng`, a `numpy.random.Generator` that depends on (seed, epoch, sample, stage name) alone. It changes the
dict in place, or returns a dict with the fields that it sets; the others stay. `del sample["field"]` drops one. With
`seeded` the global generators are seeded for each call by the same generator. If it is a class with `__call__`, each
process makes one object of it, with the arguments of `args`, and calls that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_serializer, field_validator

from loaderkit._internal.config.settings import Duration
from loaderkit._internal.imports import import_named, is_name
from loaderkit._internal.system.forks import ending_forks
from loaderkit.engine.user_code import owner_of
from loaderkit.engine.work import Stage
from loaderkit.errors import USER_ERRORS, ConfigError
from loaderkit.samples.chunk import BatchContext
from loaderkit.samples.sample import Sample
from loaderkit.samples.values import Clip, Encoded, Image, Pictures, owned
from loaderkit.sampling.global_generators import seeded_by
from loaderkit.sampling.random import generator
from loaderkit.stages.base import AddError, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind, Stream
from loaderkit.stages.media.clips import as_clip
from loaderkit.stages.runner import StageKeys, each_call
from loaderkit.stages.time_limit import TimeLimit
from loaderkit.stages.values import as_image, to_tensor

_KEY = "__key__"
_LEVELS = (torch.uint8, torch.uint16)


class CallArgs(StageArgs):
    """Call a user's function with the sample, or behind `batch` with the batch: a dict, field -> value.

    It changes the dict in place, or returns a dict that is merged into it: fields it names are set, the others stay as
    they are. `del sample["field"]` drops a field; leaving it out of the returned dict does not.
    """

    function: str | Callable[..., Any] = Field(
        description='"package.module:function", or in Python the function itself; of a class with `__call__` one object is '
        "made in each process, and called"
    )
    args: dict[str, Any] = Field(
        {}, description="keyword arguments for every call; of a class: to make its object with"
    )
    timeout: Duration | None = Field(
        None,
        description="time limit of a call; after it the sample (or batch) fails, and the call is abandoned: it may run on, and "
        "unless the function is `thread_safe` the next call waits for it, as long as for itself",
    )
    thread_safe: bool | Literal["auto"] = Field(
        "auto",
        description="true: several threads of a process may call it at once; else, and with auto, one does at a time, in which "
        "no other function or data set runs that is not declared",
    )
    seeded: bool = Field(
        False,
        description="seed the global generators of torch, NumPy and Python for every call; not with `executor: thread`",
    )

    @field_validator("function")
    @classmethod
    def _is_path(cls, value: str | Callable[..., Any]) -> str | Callable[..., Any]:
        if isinstance(value, str) and not is_name(value):
            raise ValueError(f'"package.module:function", not {value!r}')
        return value

    @field_serializer("function")
    def _to_path(self, value: str | Callable[..., Any]) -> str:
        if isinstance(value, str):
            return value
        path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        try:
            by_name: Any = load_function(path)
        except (ImportError, AttributeError, ValueError):
            by_name = None
        if by_name is not value:
            raise ValueError(f"{value!r} cannot be imported by its name: define it at the top level of a module")
        return path


class FilterArgs(CallArgs):
    """Drop the samples for which a user's function returns False.

    It gets a sample as `call` does, and returns True to keep it, or False. It must change no value in place, such as the pixels
    of an image, since it is given the values themselves: `call` is for that. A batch is shorter by the samples that are
    dropped. A dropped sample does not count as bad; a sample for which the function fails does.
    """

    on_empty_batch: Literal["raise", "skip"] = Field(
        "raise",
        description="a batch of which nothing is left is an error; or it is skipped, with one warning: then how many batches "
        "come shows at the end of the epoch, so len(loader) is a TypeError. For one rank. Several filters must all say skip",
    )


def load_function(path: str) -> Callable[..., Any]:
    """The callable at "package.module:name". Raises ImportError, AttributeError or ValueError."""
    function: Callable[..., Any] = import_named(path)
    if not callable(function):
        raise ValueError(f"{path} is {type(function).__name__}, not a function")
    return function


def load(name: str, args: CallArgs) -> Callable[..., Any]:
    """The function, or class, of the stage `name`. Raises ConfigError."""
    if not isinstance(args.function, str):
        return args.function
    try:
        return load_function(args.function)
    except USER_ERRORS as error:
        reason = str(error) if isinstance(error, (ImportError, ValueError)) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"stages.{name}.function: {args.function!r} cannot be imported: {reason}") from error


def needs_rng(function: Callable[..., Any], args: CallArgs) -> bool:
    """True if a call takes `rng`, or is seeded by it."""
    return args.seeded or _takes_rng(function)


def _takes_rng(function: Callable[..., Any]) -> bool:
    called: Any = function
    try:
        called = called.__call__ if makes_functions(function) else called
        return "rng" in inspect.signature(called).parameters
    except (TypeError, ValueError):
        return False


def makes_functions(function: Callable[..., Any]) -> bool:
    """True for a class whose objects can be called. Another class is called with the sample itself, as OrderedDict may be."""
    return isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__)


def _made(name: str, function: Callable[..., Any], args: CallArgs) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """What is called, and the arguments of each call. For a class an object is made with the arguments, and called.
    Raises ConfigError."""
    if not makes_functions(function):
        return function, args.args
    try:
        return function(**args.args), {}
    except USER_ERRORS as error:
        raise ConfigError(
            f"stages.{name}.args: the class {function.__qualname__} cannot be made with {args.args!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _bound(function: Callable[..., Any], arguments: Mapping[str, Any], args: CallArgs) -> Callable[..., Any]:
    """(value, generator or None, what else it gets) -> the result of a call."""
    takes_rng = _takes_rng(function)
    call = ending_forks(function)

    def bound(value: Any, rng: np.random.Generator | None, *others: Any) -> Any:
        with seeded_by(rng) if args.seeded and rng is not None else nullcontext():
            return call(value, *others, rng=rng, **arguments) if takes_rng else call(value, *others, **arguments)

    return bound


def call_on_sample(
    function: Callable[..., Any], sample: Sample, key: str, rng: np.random.Generator | None, *, is_kept: bool = False
) -> Sample:
    """The sample after the call. Images become tensors for it, and images again after it if they still are. `is_kept`: a data
    set or a source may keep its values, so the function gets copies."""
    given = given_of(sample, key)
    if is_kept:
        given = {name: owned(value) for name, value in given.items()}
    copies = {name: given[name] for name, value in sample.items() if type(value) is Encoded}
    return taken_of(sample, copies, merged(given, function(given, rng)))


def taken_of(sample: Sample, copies: Mapping[str, Any], result: Sample) -> Sample:
    """What a function left of a sample, in the form for other stages. The function was given `copies` in place of
    encoded bytes: those that it did not touch are replaced by the encoded bytes again, and tensors that were images
    become images."""
    result.pop(_KEY, None)
    for name, data in copies.items():
        if result.get(name) is data:
            result[name] = sample[name]
    for name, image in sample.items():
        value = result.get(name)
        if type(image) is Image and isinstance(value, torch.Tensor) and value.ndim == 3 and value.dtype in _LEVELS:
            after = _as_before(value, image)
            if after is not None:
                result[name] = after._replace(mask=image.mask)
        elif type(image) is Clip and isinstance(value, torch.Tensor) and value.ndim == 4:
            result[name] = as_clip(value) or value
        elif type(image) is Pictures and isinstance(value, list):
            result[name] = _pictures_of(value, image) or value
    return result


def _pictures_of(values: list[Any], before: Pictures) -> Pictures | None:
    """What became of pictures, in any number, as pictures; None if one is none."""
    like = before.images[0] if before.images else None
    made = []
    for value in values:
        is_picture = isinstance(value, torch.Tensor) and value.ndim == 3 and value.dtype in _LEVELS
        image = (as_image(value) if like is None else _as_before(value, like)) if is_picture else None
        if image is None:
            return None
        made.append(image._replace(mask=like is not None and like.mask))
    return Pictures(tuple(made))


def _as_before(value: torch.Tensor, image: Image) -> Image | None:
    """What a function left of an image, uint8 or uint16 [C, H, W], as an image; None if it is no image any more."""
    is_here = value.device.type == "cpu" and value.layout is torch.strided
    if is_here and value.shape[0] == image.pixels.shape[2]:
        return Image(value.permute(1, 2, 0).numpy())
    if value.dtype == torch.uint8:
        return as_image(value)
    return Image(value.permute(1, 2, 0).numpy()) if is_here and value.shape[0] in (1, 3) else None


def filter_sample(
    function: Callable[..., Any], sample: Sample, key: str, rng: np.random.Generator | None
) -> Sample | None:
    """The sample, if the function keeps it. The function is given the values themselves, not copies."""
    kept = function(given_of(sample, key), rng)
    if isinstance(kept, (np.generic, np.ndarray, torch.Tensor)):
        kept = kept.item()
    if type(kept) is not bool:
        raise TypeError(
            f"the function returned {type(kept).__name__}; it must return True to keep the sample, or False to drop it"
        )
    return sample if kept else None


def given_of(sample: Sample, key: str) -> Sample:
    """What a function sees of a sample: images as tensors, and copies of encoded bytes, which lie in reused memory. Raises
    ValueError for a sample with a key of its own, which the function would not see."""
    if _KEY in sample:
        raise ValueError(
            f"its field {_KEY!r} has a reserved name: rename it, as by `fields: {{id: {_KEY}, ...}}` in `source` with the "
            "other fields"
        )
    given = {
        name: to_tensor(value)
        if type(value) in (Image, Clip)
        else [to_tensor(image) for image in value.images]
        if type(value) is Pictures
        else bytes(value.data)
        if type(value) is Encoded
        else value
        for name, value in sample.items()
    }
    return {**given, _KEY: key}


def call_on_batch(
    function: Callable[..., Any], batch: dict[str, Any], rng: np.random.Generator | None
) -> dict[str, Any]:
    """The batch after the call."""
    return merged(batch, function(batch, rng))


def merged(given: dict[str, Any], returned: Any) -> dict[str, Any]:
    """The given fields as the function left them, updated with the fields that it returned."""
    if returned is None or returned is given:
        return given
    if not isinstance(returned, Mapping):  # such as a tokenizer's BatchEncoding, too
        raise TypeError(
            f"the function returned {type(returned).__name__}; it must return a dict, which is merged into the one given, "
            "or None"
        )
    return {**given, **returned}


def _compile(stage: StageConfig, context: CompileContext) -> Stage:
    args, keys = stage.args, context.keys(stage)
    assert isinstance(args, CallArgs)
    is_batch = stage not in context.before_batch
    function, wants_rng, limit, owner = limited(stage.name, args, context.stream if is_batch else None)
    close = None if limit is None else limit.close
    if is_batch:
        run_batch = _on_batches(function, keys if wants_rng else None)
        return stage.ready("batch", run_batch, close=close, owner=owner)
    call: Callable[..., Any] = filter_sample if isinstance(args, FilterArgs) else call_on_sample
    if call is call_on_sample and context.may_be_kept and _is_first_call(stage, context):
        call = partial(call_on_sample, is_kept=True)
    run = each_call(partial(call, function), keys if wants_rng else None, context.source, context.failed(stage))
    return stage.ready("sample", run, close=close, owner=owner)


def _is_first_call(stage: StageConfig, context: CompileContext) -> bool:
    """True if no function before this one has got copies."""
    calls = (
        one for one in context.before_batch if isinstance(one.args, CallArgs) and not isinstance(one.args, FilterArgs)
    )
    return next(calls, None) is stage


def limited(name: str, args: CallArgs, stream: Stream | None) -> tuple[Callable[..., Any], bool, TimeLimit | None, Any]:
    """The function, whether it needs `rng`, its time limit, and the object that one thread at a time may be in, if that is so.
    With a limit it runs in another thread, on the same stream."""
    loaded, arguments = _made(name, load(name, args), args)
    owner = None if args.thread_safe is True else owner_of(loaded)
    function, wants_rng = _bound(loaded, arguments, args), needs_rng(loaded, args)
    if args.timeout is None:
        return function, wants_rng, None, owner
    limit = TimeLimit(name, args.timeout, is_alone=owner is not None)
    return partial(limit, function if stream is None else stream.bound(function)), wants_rng, limit, owner


def _on_batches(function: Callable[..., Any], keys: StageKeys | None) -> Callable[[dict[str, Any], BatchContext], None]:
    """A batch stage from the function; `keys` is given only if it needs `rng`."""

    def run(batch: dict[str, Any], context: BatchContext) -> None:
        rng = generator(keys[context.epoch], context.first_position) if keys is not None else None
        kept: dict[str, Any] = {name: batch[name] for name in ("__key__", "__wrapped__") if name in batch}
        result = kept | call_on_batch(function, batch, rng)  # the function may have dropped them
        batch.clear()
        batch.update(result)

    return run


def check(stages: Sequence[StageConfig], number: int, kinds: Mapping[str, StageKind], add_error: AddError) -> None:
    args = stages[number].args
    assert isinstance(args, CallArgs)
    if args.seeded and args.timeout is not None:
        add_error(
            number, "not with `timeout`: a call that is abandoned would draw the numbers of the next one", "seeded"
        )
    if args.seeded and any(kinds[stage.kind].stream is not None for stage in stages[:number]):
        add_error(
            number,
            "not after `transfer`, in the process that trains: put it before, or let the function take `rng`",
            "seeded",
        )


CALL = StageKind(
    CallArgs,
    "either",
    compile=_compile,
    check=check,
    runs_user_code=True,
    args_of_speed=frozenset({"timeout", "thread_safe"}),
    objects=lambda args: {"function": args.function, "args": args.args},
)
FILTER = replace(CALL, args=FilterArgs, scope="sample", args_of_refusal=frozenset({"on_empty_batch"}))
