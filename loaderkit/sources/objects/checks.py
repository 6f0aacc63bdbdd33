"""Checks whether the order of a Python object's items can be relied on, and an iterable's state: by what the object
says of itself, and by the first items, for `loaderkit check`."""

from __future__ import annotations

import copy
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from loaderkit._internal.compare import differ
from loaderkit._internal.system.cgroups import free_memory
from loaderkit._internal.system.forks import ending_forks
from loaderkit.errors import USER_ERRORS, SourceError
from loaderkit.sources.objects.args import DatasetArgs, open_object

_NUM_ITEMS = 8  # to compare
_ANSWER_S = 120.0  # for another process to import what it needs and to make them
_ANSWER = """
import pickle, sys
sys.path[:], *given = pickle.load(sys.stdin.buffer)
from loaderkit.sources.objects.checks import write_items
write_items(*given)
"""
_MOST_SEED = 1 << 64  # what NumPy makes up where no seed is given has 128 bits


def num_ranks_of(iterable: Any) -> int:
    """The number of ranks that a data set of `datasets`, or a DataLoader, says it is split over."""
    split, sampler = getattr(iterable, "_distributed", None), getattr(iterable, "sampler", None)
    sizes = (getattr(split, "world_size", 1), getattr(sampler, "num_replicas", 1))
    return max(size if isinstance(size, int) else 1 for size in sizes)


def is_unseeded(iterable: Any) -> bool:
    """True if its order comes from a generator without a seed, so that another process has another order. Such are a
    DataLoader that draws from the global generator (torch's samplers that draw have a `generator`), and a data set of
    `datasets` that shuffles without a seed."""
    parts = (iterable, getattr(iterable, "dataset", None))
    return getattr(getattr(iterable, "sampler", None), "generator", True) is None or any(
        _is_made_up(generator) for part in parts for generator in _generators(getattr(part, "_ex_iterable", None))
    )


def _generators(part: Any) -> Iterator[np.random.Generator]:
    """The generators by which the parts of a streaming data set of `datasets` shuffle, or choose among others."""
    if part is None:
        return
    if isinstance(generator := getattr(part, "generator", None), np.random.Generator):
        yield generator
    for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())):
        yield from _generators(inner)


def _is_made_up(generator: np.random.Generator) -> bool:
    """True if NumPy had to make up the generator's seed. Some versions forget the seeds of copies: then nothing is known."""
    seed = _seed_of(generator)
    return isinstance(seed, int) and _MOST_SEED <= seed < 1 << 128 and _seed_of(copy.deepcopy(generator)) == seed


def _seed_of(generator: np.random.Generator) -> Any:
    return getattr(getattr(generator.bit_generator, "seed_seq", None), "entropy", None)


def items_differ(make: Callable[[], Any]) -> bool:
    """True if two passes of one epoch, over what `make` returns, give other first items: then two ranks or processes would as
    well. False also where items cannot be compared."""
    first, second = (_packed(_begun(make())) for _ in range(2))
    return first is not None and second is not None and first != second


def state_is_inexact(make: Callable[[], Any], name: str) -> bool:
    """True if a second iterable from `make` that has loaded the first one's state gives other items than those that come next.
    Raises SourceError, which names the iterable, if the state cannot be loaded."""
    iterable, resumed = make(), make()
    iterator = _begun(iterable)
    _packed(iterator, _NUM_ITEMS // 2)
    if hasattr(resumed, "set_epoch"):
        resumed.set_epoch(0)
    try:
        state = copy.deepcopy(iterable.state_dict())
        resumed.load_state_dict(state)
    except USER_ERRORS as error:
        raise SourceError(
            f"the state of the iterable {name} cannot be taken and loaded ({type(error).__name__}: {error}): mend "
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


def seen_alike(opened: Any, args: DatasetArgs, *, is_iterable: bool) -> bool:
    """False if another process is known to see other first items than `opened` gives here, or another number of items:
    then every rank would. True also for items that differ each time they are looked at, for an object that has no name,
    and where nothing can be found out, as where memory may not suffice for a second copy of this data set."""
    free_bytes, _ = free_memory()
    if not isinstance(args.object, str) or (free_bytes is not None and free_bytes < _peak_bytes()):
        return True
    try:
        here = _first_items(opened, is_iterable)
        if not is_iterable and differ(here, _first_items(opened, is_iterable)):
            return True
        with TemporaryDirectory() as folder:
            path = Path(folder, "items")
            subprocess.run(  # noqa: S603 - this interpreter
                [sys.executable, "-c", _ANSWER],
                input=pickle.dumps((sys.path, str(path), args.object, args.args, is_iterable)),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_ANSWER_S,
                check=True,
            )
            there = pickle.loads(path.read_bytes())  # noqa: S301 - of the process that this one has started
    except Exception:
        return True
    return not differ(here, there)


def write_items(path: str, name: str, args: dict[str, Any], is_iterable: bool) -> None:
    """Write the first items to a file, for the process that compares them with its own."""
    needed = ("__iter__",) if is_iterable else ("__len__", "__getitem__")
    opened = open_object(DatasetArgs(object=name, args=args), needed)
    Path(path).write_bytes(pickle.dumps(_first_items(opened, is_iterable)))


def _first_items(opened: Any, is_iterable: bool) -> tuple[int | None, list[Any]]:
    """The number of items, if that is known, and the first of them."""
    if is_iterable:
        return None, list(islice(_begun(opened), _NUM_ITEMS))
    size = len(opened)
    return size, [opened[number] for number in range(min(size, _NUM_ITEMS))]


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
