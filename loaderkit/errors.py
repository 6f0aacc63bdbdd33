"""Every error loaderkit raises on purpose.

    LoaderkitError
    ├── ConfigError            the pipeline's description is wrong (also a ValueError)
    ├── MissingExtraError      an optional package is not installed (also an ImportError)
    ├── ConnectorError         a store did not give the bytes asked for (also an OSError)
    │   ├── ObjectNotFoundError    no object has this key
    │   ├── AccessDeniedError      the store refuses to show it
    │   │   └── ExpiredCredentialsError   the credentials are not valid any more
    │   ├── ObjectChangedError     it was replaced since it was listed
    │   ├── ShortReadError         it ended before the range asked for
    │   └── TemporaryError         a failure that may pass; retried for as long as `source.retry` allows
    │       ├── ThrottledError         the store asked for fewer requests
    │       ├── UnreachableError       no connection, or one that broke
    │       ├── RequestTimeoutError    no answer in time (also a TimeoutError)
    │       ├── TruncatedError         the answer ended early (also a ShortReadError)
    │       └── ChecksumError          the bytes are not those whose checksum is known
    ├── FormatError            the bytes are not what their format promises (also a ValueError)
    ├── CheckpointError        a checkpoint cannot be restored: partial, damaged, or not what is to be filled
    ├── PeerError              another rank, with which this one shares a checkpoint or batches, failed or died
    ├── SourceError            the data set cannot be used: empty, no match, inconsistent
    │   └── TooManyBadShardsError    `errors.max_bad_shards` was passed
    ├── StageError             a stage failed on a sample or a batch; the cause is chained
    │   └── TooManyBadSamplesError   `errors.max_bad_samples` was passed
    ├── DeviceError            a kernel on the GPU failed, of whatever code of the process (also a RuntimeError)
    ├── StallTimeout           no batch within `prefetch.timeout`, and `on_timeout: raise` was asked for (also a TimeoutError)
    ├── WorkerDiedError        the process that loads (`executor: process`) ended by itself once too often, or could not start
    ├── RemoteError            stands for an exception of that process which cannot be pickled
    ├── StateError             a saved state belongs to another pipeline or data set
    └── ClosedError            a closed loader, or one carried across a fork, was used

A message says what happened, where, and what to do. All of them survive pickling with their message and attributes,
so that they may cross a process boundary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s]+@")
USER_ERRORS = (Exception, SystemExit, GeneratorExit)
"""The errors of a user's function that count as a failure of its sample. KeyboardInterrupt is none of them: it ends the
loop."""


class LoaderkitError(Exception):
    """Base of all errors raised by loaderkit on purpose. What they say can be printed and logged, whatever characters the
    names of files have; see `printable`."""

    def __init__(self, *values: object) -> None:
        super().__init__(*(printable(value) if isinstance(value, str) else value for value in values))


def printable(text: str) -> str:
    """Text for a terminal or a log: passwords of URLs are left out, and all but line ends and tabs that `repr` would escape
    is escaped as it does.

    A terminal obeys control characters (it moves the cursor, changes its title, writes to the program's input), and lone
    surrogates, which stand for bytes that are no UTF-8, are refused by whatever writes UTF-8.
    """
    if "@" in text:
        text = _PASSWORD.sub(r"\1***@", text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a pipeline's description.

    `where` is the dotted key (`stages.decode.device`), `line` the 1-based line in the file when there is one.
    """

    where: str
    message: str
    line: int | None = None


class ConfigError(LoaderkitError, ValueError):
    """The description of a pipeline is wrong; `problems` lists everything found, not only the first."""

    def __init__(self, message: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class MissingExtraError(LoaderkitError, ImportError):
    """An optional package is needed and not installed; the message gives the pip command."""


class ConnectorError(LoaderkitError, OSError):
    """A store did not give the bytes asked for."""

    def __str__(self) -> str:  # OSError's own would print an errno tuple
        return str(self.args[0]) if self.args else type(self).__name__


class ObjectNotFoundError(ConnectorError):
    """No object has this key."""


class AccessDeniedError(ConnectorError):
    """The store refuses to show the object."""


class ObjectChangedError(ConnectorError):
    """The object was replaced since it was listed, so its bytes would not belong together."""


class ShortReadError(ConnectorError):
    """The object ended before the range asked for was complete."""


class ExpiredCredentialsError(AccessDeniedError):
    """The credentials were valid once and are not any more, or not yet."""


class TemporaryError(ConnectorError):
    """A store failed in a way that may be over soon. Raised after retries for as long as `source.retry` allows."""


class ThrottledError(TemporaryError):
    """The store is overloaded, or this client has reached its limit of requests."""


class UnreachableError(TemporaryError):
    """The store cannot be connected to, or a connection broke."""


class RequestTimeoutError(TemporaryError, TimeoutError):
    """The store did not answer, or stopped sending, in time."""


class TruncatedError(ShortReadError, TemporaryError):
    """The store's answer ended before the object did."""


class ChecksumError(TemporaryError):
    """The bytes that came are not those whose checksum is known."""


STORE_FAILURES = (ExpiredCredentialsError, ThrottledError, UnreachableError, RequestTimeoutError)
"""Failures of the store, not of a sample: it is unreachable or refuses the credentials. `on_bad_sample` does not apply."""


class FormatError(LoaderkitError, ValueError):
    """The bytes are not what their format promises."""


class CheckpointError(LoaderkitError):
    """A checkpoint cannot be restored: it is partial or damaged, or its names, shapes and types are not those to be filled.

    `touched` names the tensors that were given to be filled and have been written to already, in part or whole; `missing` are
    names that are wanted and not there, `unexpected` those that are there and not wanted.
    """

    def __init__(
        self,
        message: str,
        *,
        touched: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.touched = touched
        self.missing = missing
        self.unexpected = unexpected


class PeerError(LoaderkitError):
    """Another rank failed, died or hung while ranks shared a checkpoint, or batches (`ranks: {share: broadcast}`);
    `ranks` are the ranks at fault, where they are known. `touched` names the tensors of a restore that have been
    written to already."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), touched: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.touched = touched


class SourceError(LoaderkitError):
    """The data set cannot be used: it is empty, nothing matches, or its parts contradict one another."""


class TooManyBadShardsError(SourceError):
    """More shards are damaged or missing than `errors.max_bad_shards` allows; the message names all."""


class StageError(LoaderkitError):
    """A stage failed on one sample, or on one batch; the original exception is `__cause__`.

    `stage` is the stage's name, `key` the sample's key (None for a batch), `origin` the object it came from,
    `epoch` and `position` say where the sample is in the order.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: str = "",
        key: str | None = None,
        origin: str = "",
        epoch: int = 0,
        position: int = 0,
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.key = key
        self.origin = origin
        self.epoch = epoch
        self.position = position


class TooManyBadSamplesError(StageError):
    """More samples of one epoch were bad than `errors.max_bad_samples` allows."""


class DeviceError(LoaderkitError, RuntimeError):
    """A kernel on the GPU failed, of the training step or of any other code of the process. CUDA reports that to every later
    call, so a loader is often the first to meet it; the process cannot use its GPU any more. `__cause__` is torch's error."""


class StallTimeout(LoaderkitError, TimeoutError):  # noqa: N818 - its name in the public interface
    """No batch came within `prefetch.timeout`; the message has where every chunk of it is, and the workers' stacks.

    `waited_s` is how long; `stage` and `key` say where the least advanced chunk is: None in a queue, or not known.
    """

    def __init__(
        self, message: str, *, waited_s: float = 0.0, stage: str | None = None, key: str | None = None
    ) -> None:
        super().__init__(message)
        self.waited_s = waited_s
        self.stage = stage
        self.key = key

    def __str__(self) -> str:  # OSError's own would print an errno tuple
        return str(self.args[0]) if self.args else type(self).__name__


class WorkerDiedError(LoaderkitError, RuntimeError):
    """The process that loads was killed, crashed, left by itself or could not be started, and was not started again.

    `exit_code` is its own, or minus the signal's number; None if there is none, or it is not known. `samples` are the keys of
    the batch that it made, as far as they are known.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, samples: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.samples = tuple(samples)


class RemoteError(LoaderkitError):
    """Stands for an exception of the process that loads which cannot be pickled: the message has its type and text."""


class StateError(LoaderkitError, ValueError):
    """A saved state does not fit this loader; the message names what differs."""


class ClosedError(LoaderkitError, RuntimeError):
    """The loader was closed, belongs to the parent of a fork, or to a connection to a Ray cluster that has ended."""
