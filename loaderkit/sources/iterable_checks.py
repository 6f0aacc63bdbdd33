"""What `loaderkit check` finds out by iterating over the first items: can the iterable's order and its state be relied on?"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

from loaderkit._internal.forks import ending_forks
from loaderkit.errors import USER_ERRORS, SourceError
from loaderkit.sources.iterable import IterableSource

_NUM_ITEMS = 8  # to compare


def items_differ(source: IterableSource) -> bool:
    """True if two passes of one epoch give other first items: then two ranks or processes would as well. False also where
    items cannot be compared."""
    first, second = (_packed(_begun(source.make_another())) for _ in range(2))
    return first is not None and second is not None and first != second


def state_is_inexact(source: IterableSource) -> bool:
    """True if a copy that has loaded the iterable's state gives other items than those that come next. Raises SourceError if
    the state cannot be loaded."""
    if not source.has_state:
        return False
    iterable, resumed = source.make_another(), source.make_another()
    iterator = _begun(iterable)
    _packed(iterator, _NUM_ITEMS // 2)
    if hasattr(resumed, "set_epoch"):
        resumed.set_epoch(0)
    try:
        state = copy.deepcopy(iterable.state_dict())
        resumed.load_state_dict(state)
    except USER_ERRORS as error:
        raise SourceError(
            f"the state of the iterable {source.origin(0)} cannot be taken and loaded ({type(error).__name__}: {error}): mend "
            "its state_dict and load_state_dict, or set `resume: skip`"
        ) from error
    expected, found = _packed(iterator), _packed(ending_forks(iter)(resumed))
    return expected is not None and found is not None and expected != found


def _begun(iterable: Any) -> Iterator[Any]:
    if hasattr(iterable, "set_epoch"):
        iterable.set_epoch(0)
    iterator: Iterator[Any] = ending_forks(iter)(iterable)
    return iterator


def _packed(iterator: Iterator[Any], num: int = _NUM_ITEMS) -> list[bytes] | None:
    """The next items as bytes; None if they cannot be pickled."""
    try:
        return [pickle.dumps(item) for item in islice(iterator, num)]
    except Exception:
        return None
