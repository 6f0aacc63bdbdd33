"""The settings of a `CheckpointManager`: from arguments, a mapping, or a checkpoint.yaml."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from loaderkit._internal.config.diagnostics import Problems
from loaderkit._internal.config.model_errors import validate
from loaderkit._internal.config.paths import absolute_path
from loaderkit._internal.config.settings import Duration, Model, as_tuple
from loaderkit._internal.config.yaml_text import expand_variables, read_yaml
from loaderkit._internal.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from loaderkit.errors import ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEPS = re.compile(r"\s*(\d+)\s*(?:steps?)?\s*")


class Every(NamedTuple):
    """How often to save: every `steps` steps, or every `seconds` seconds, or with `is_auto` at the interval that follows from
    what saving costs."""

    steps: int | None = None
    seconds: float | None = None
    is_auto: bool = False


def _parse_every(value: Any) -> Every:
    """Raises ValueError."""
    if isinstance(value, Every):
        return value
    if value == "auto":
        return Every(is_auto=True)
    match = _STEPS.fullmatch(str(value)) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
    if match is not None and int(match[1]) > 0:
        return Every(steps=int(match[1]))
    if isinstance(value, str) and match is None:
        try:
            seconds = parse_seconds(value)
        except ValueError:
            seconds = 0.0
        if seconds > 0:
            return Every(seconds=seconds)
    raise ValueError(
        f"a number of steps such as 500, or a duration with its unit such as 10min, or auto, not {value!r}"
    )


def _say_every(value: Every | None) -> int | str | None:
    if value is None:
        return None
    if value.is_auto:
        return "auto"
    return value.steps if value.seconds is None else format_seconds(value.seconds)


_SERIALIZED = PlainSerializer(_say_every, when_used="always")


def _known_signal(name: str) -> str:
    known = [item.name for item in signal.Signals]
    if name not in known:
        raise ValueError(f"the name of a signal such as SIGTERM or SIGUSR1, not {name!r}")
    if name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"a signal that a program can catch, not {name!r}")
    return name


class BestArgs(Model):
    """The checkpoints with the best values of a metric that is given to `save`."""

    metric: str = Field(description="the name in `metrics`")
    mode: Literal["min", "max"] = Field("min", description="whether lower or higher values are better")
    num: int = Field(1, ge=1, description="how many are kept")


class KeepArgs(Model):
    """Which checkpoints are kept: those that any of these rules names, and always the newest."""

    last: int = Field(1, ge=1, description="the newest ones")
    every: int | None = Field(None, ge=1, description="those whose step is a multiple of this")
    max_age_s: Annotated[Duration | None, Field(alias="for")] = Field(
        None, description="how long those of `every` are kept; default for ever"
    )
    best: BestArgs | None = Field(None, description="the best by a metric")

    @model_validator(mode="after")
    def _check(self) -> KeepArgs:
        if self.max_age_s is not None and self.every is None:
            raise ValueError("`for` says how long those of `every` are kept: give `every`, too")
        return self


def parse_speed(value: Any) -> int:
    """A speed in bytes per second: a number, or text such as "500MB/s". Raises ValueError."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError(f"a speed such as 500MB/s, 1GiB/s or a number of bytes per second, not {value!r}") from None


Speed = Annotated[
    int,
    BeforeValidator(parse_speed),
    Field(gt=0),
    PlainSerializer(lambda value: None if value is None else f"{format_bytes(value)}/s", when_used="always"),
]


PathText = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]


class UploadArgs(Model):
    """How checkpoints get from `local` to `to`."""

    bandwidth: Speed | None = Field(None, description="at most so many bytes per second; default as fast as it goes")


def _keep_of(value: Any) -> Any:
    """`keep: 2` says `keep: {last: 2}`."""
    return {"last": value} if type(value) is int else value


class LocalArgs(Model):
    """A faster directory in which checkpoints are committed first, and from which they are uploaded to `to`."""

    path: PathText = Field(
        min_length=1, description="the directory, on NVMe or tmpfs, that all ranks share; of this run alone"
    )
    keep: Annotated[KeepArgs, BeforeValidator(_keep_of)] = Field(
        KeepArgs(last=1),
        description="which stay there: the newest N, or rules as in `keep`; default 1; what waits for its upload stays",
    )
    upload: UploadArgs = Field(UploadArgs(bandwidth=None), description="how they are uploaded")


class CopyArgs(Model):
    """An export beside the checkpoints: tensors in fewer bits, as safetensors, that training does not go on from."""

    to: PathText = Field(min_length=1, description="the directory of the exports; nothing is removed there")
    every: int | None = Field(None, ge=1, description="of those saves whose step is a multiple of this; default of all")
    dtype: Literal["bfloat16", "float16"] | None = Field(None, description="the type of its floating-point tensors")
    quantize: Literal["int8"] | None = Field(
        None, description="int8 in place of `dtype`, with a scale for each block of 256 elements"
    )
    keys: Annotated[
        tuple[str, ...] | None, BeforeValidator(lambda value: (value,) if isinstance(value, str) else as_tuple(value))
    ] = Field(
        None,
        description="globs of the names that it contains; default `model.*`, with `quantize` the moments of the optimizer",
    )

    @model_validator(mode="after")
    def _check(self) -> CopyArgs:
        if (self.dtype is None) == (self.quantize is None):
            raise ValueError("a copy has either `dtype` or `quantize`: say in how many bits it is to be")
        if self.keys == ():
            raise ValueError("`keys` is empty, so the copy would be: leave it out, or give globs of names")
        return self

    @property
    def globs(self) -> tuple[str, ...]:
        """`keys`, or the default."""
        moments = ("*.exp_avg", "*.exp_avg_sq", "*.max_exp_avg_sq", "*.momentum_buffer")
        return self.keys or (moments if self.quantize else ("model.*",))


_LEAST_END_S = 1e9  # of 2001: less is a duration


def _known_end(value: Any) -> Any:
    """The name of an environment variable, or a number of seconds of Unix time."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and 0 < value < _LEAST_END_S:
        raise ValueError(
            f"the end in seconds of Unix time, as time.time() + 3600 gives it: {value:g} was in "
            f"{1970 + int(value / 31556952)}, so the job would stop after its first step"
        )
    if not (is_number and value > 0) and not (isinstance(value, str) and _VARIABLE.fullmatch(value)):
        raise ValueError(
            f"an environment variable such as SLURM_JOB_END_TIME, or the end in seconds of Unix time, not {value!r}"
        )
    return float(value) if is_number else value


def _known_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"a URL of http or https, not {url!r}; files belong into `files`")
    return url


class NoticeArgs(Model):
    """How a job is told that it will be ended soon, and how much time it then has."""

    signals: Annotated[tuple[Annotated[str, AfterValidator(_known_signal)], ...], BeforeValidator(as_tuple)] = Field(
        ("SIGTERM",), description="signals that announce the end; any rank may get one"
    )
    within: Duration | None = Field(
        None,
        description="how long after a notice the job must have ended: of the state is saved what fits into that by this run's "
        "measured rates; default the whole, however long that takes",
    )
    files: Annotated[tuple[PathText, ...], BeforeValidator(as_tuple)] = Field(
        (), description="files that announce the end by being there; each rank looks every second"
    )
    urls: Annotated[tuple[Annotated[str, AfterValidator(_known_url)], ...], BeforeValidator(as_tuple)] = Field(
        (),
        description="URLs of a cloud's metadata that announce the end; one rank of each machine asks every five seconds",
    )
    until: Annotated[
        str | float | None, BeforeValidator(lambda value: None if value is None else _known_end(value))
    ] = Field(
        None,
        description="when the job ends in any case: an environment variable with that time, such as SLURM_JOB_END_TIME, "
        "or seconds of Unix time; it stops `within` before",
    )

    @model_validator(mode="after")
    def _check(self) -> NoticeArgs:
        if not (self.signals or self.files or self.urls or self.until):
            raise ValueError("nothing announces the end: give `signals`, `files`, `urls` or `until`")
        if self.until is not None and self.within is None:
            raise ValueError(
                "`until` is when the job ends: `within` says how long before that it is to stop, give it, too"
            )
        return self


class SaveSettings(Model):
    """Where and when to save, and what to keep."""

    to: PathText = Field(
        min_length=1, description="the directory of the checkpoints: a path or a URL such as s3://bucket/runs/a"
    )
    local: Annotated[
        LocalArgs | None,
        BeforeValidator(lambda value: {"path": value} if isinstance(value, (str, os.PathLike)) else value),
    ] = Field(
        None, description="a faster directory in which they are committed first, then uploaded: a path or a mapping"
    )
    replicas: int = Field(
        0,
        ge=0,
        le=1,
        description="1: each node has a `local` of its own, and keeps there what the node before it has saved, too, so that "
        "one node's may be lost",
    )
    every: Annotated[
        Every | None, BeforeValidator(lambda value: None if value is None else _parse_every(value)), _SERIALIZED
    ] = Field(
        None,
        description="each N steps, a duration such as 10min, or auto: by what saving costs here and by `mtbf`, so that the "
        "least training is lost; default: each step for which `save` is called",
    )
    mtbf: Duration | None = Field(
        None,
        description="for `every: auto`: the mean time from one interruption of the job to the next, such as 6h; default "
        "learned from the restarts of this run, beginning with one a day",
    )
    keep: KeepArgs | None = Field(None, description="which checkpoints stay; default all")
    format: Literal["dcp", "safetensors"] = Field(
        "dcp",
        description="torch.distributed.checkpoint's files, or whole tensors in files that Hugging Face's loaders read",
    )
    optimizer_keys: Literal["auto", "names", "numbers"] = Field(
        "auto",
        description="the keys of an optimizer's state: the names of its parameters in the model, as torch's `get_state_dict` "
        "gives them, or their numbers; auto: names with format dcp where its model is in the state, else numbers",
    )
    when_busy: Literal["wait", "skip"] = Field(
        "wait", description="what a save does while another is being written: wait for it, or leave this one out"
    )
    flush: Literal["thread", "process"] = Field(
        "thread",
        description="what writes the copy of the state: a thread, or a process of its own, which does not share Python's lock "
        "with training",
    )
    copies: Annotated[tuple[CopyArgs, ...], BeforeValidator(as_tuple)] = Field(
        (), description="exports in fewer bits, made from the saved state behind training"
    )
    notice: NoticeArgs | None = Field(
        None, description="signals, files or a time at which all ranks save at the same step, and stop"
    )

    @model_validator(mode="after")
    def _check(self) -> SaveSettings:
        if self.mtbf is not None and (self.every is None or not self.every.is_auto):
            raise ValueError("`mtbf` tells `every: auto` how often to save: set that, too")
        return self


def save_settings(target: str | os.PathLike[str] | Mapping[str, Any], **arguments: Any) -> SaveSettings:
    """The settings that a URL, a mapping or a .yaml file describes, with `arguments` that are not None on top.

    A relative path is relative to the file, or to the working directory. Raises ConfigError with file, line and key.
    """
    base, problems = Path.cwd(), Problems(None, "CheckpointManager")
    if isinstance(target, Mapping):
        data: Any = dict(target)
    elif (text := os.fspath(target)).endswith((".yaml", ".yml")):
        path = Path(text)
        base, problems = path.parent.absolute(), Problems(path)
        data = read_yaml(_text_of(path), problems)
    else:
        data = {"to": text}
    problems.raise_problems()
    if not isinstance(data, dict):
        given = "nothing" if data is None else type(data).__name__
        problems.error((), f"settings of checkpoints are a mapping with at least `to`, this is {given}")
        problems.raise_problems()
    if problems.file is not None:
        data = expand_variables(data, (), problems)
    data |= {name: value for name, value in arguments.items() if value is not None}
    settings = validate(SaveSettings, data, (), problems)
    problems.raise_problems()
    assert settings is not None
    settings = settings.model_copy(update={"to": _absolute(settings.to, base)})
    if settings.replicas and settings.local is None:
        raise ConfigError("replicas: they are of what is in `local`: give that, too")
    if settings.local is not None:
        local = settings.local.model_copy(update={"path": _absolute(settings.local.path, base)})
        if settings.replicas and _URL.match(local.path):
            raise ConfigError(f"replicas: the folder of a node is a path on its own disk or tmpfs, not {local.path!r}")
        if local.path == settings.to:
            raise ConfigError(
                f"local.path: {local.path!r} is `to` as well: leave `local` out, or give another directory"
            )
        settings = settings.model_copy(update={"local": local})
    copies = tuple(copy.model_copy(update={"to": _absolute(copy.to, base)}) for copy in settings.copies)
    places = [settings.to, *(() if settings.local is None else (settings.local.path,)), *(copy.to for copy in copies)]
    if twice := [place for place in places if places.count(place) > 1]:
        raise ConfigError(
            f"copies: {twice[0]!r} has something else in it already: give each copy a directory of its own"
        )
    return settings.model_copy(update={"copies": copies})


def _absolute(path: str, base: Path) -> str:
    """A URL as it is; a path from `base` on."""
    return path if _URL.match(path) else absolute_path(base / Path(path).expanduser())


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: the settings cannot be read: {reason}") from error
