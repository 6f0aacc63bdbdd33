"""A finished batch on its way from another process to the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loaderkit.engine.metrics.stalls import WaitSegment
from loaderkit.engine.remote import error_transport
from loaderkit.engine.work import SourceCounts
from loaderkit.errors import StageError


@dataclass
class Delivered:
    """A finished work item that a worker process sends. `failures` and `error` are packed in the message."""

    epoch: int
    end: int
    num_items: int
    name: str  # in messages
    result: Any
    context: Any  # of the result, for stages in the trainer's process
    failures: Sequence[Any]  # tuples with a field `error`
    num_dropped: int
    is_empty: bool
    is_end: bool
    source_state: Any
    error: BaseException | None
    done_s: float
    segments: Sequence[WaitSegment]
    num_skipped: int = 0
    by_source: SourceCounts | None = None

    def __len__(self) -> int:
        return self.num_items

    def sealed(self) -> Delivered:
        """A copy with packed errors."""
        failures: Any = [failure._replace(error=error_transport.pack_error(failure.error)) for failure in self.failures]
        error: Any = None if self.error is None else error_transport.pack_error(self.error)
        return Delivered(**{**self.__dict__, "failures": failures, "error": error})

    def unsealed(self, where: str = "the process that loads") -> Delivered:
        """The inverse of `sealed`; `where` it was made, for the tracebacks of errors."""
        failures = []
        for failure in self.failures:
            error = error_transport.unpack_error(failure.error, where)
            assert isinstance(error, StageError)
            failures.append(failure._replace(error=error))
        sealed: Any = self.error
        raised = None if sealed is None else error_transport.unpack_error(sealed, where)
        return Delivered(**{**self.__dict__, "failures": failures, "error": raised})
