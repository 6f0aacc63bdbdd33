"""`loaderkit.watch`: gives the same batches as an iterable, and accounts for what the loop waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from loaderkit.diagnosis.watched.stats import WatchedStats
from loaderkit.pipeline.delivery.batch_numbers import DataLoaderParts
from loaderkit.profile.recording import Profile
from loaderkit.profile.watched.iterator import open_watched
from loaderkit.profile.watched.recorder import Recorder
from loaderkit.profile.watched.subject import watched_subject

Batch = TypeVar("Batch")


class Watched(Generic[Batch]):
    """An iterable that gives the batches of another one, and keeps accounts of the loop that takes them.

    All other attributes are taken from what is watched, also for `isinstance`. One thread iterates.
    """

    if not TYPE_CHECKING:  # all but the class itself comes from what is watched

        @property
        def __class__(self) -> type:
            return self._loaderkit_inner.__class__

    def __init__(self, iterable: Iterable[Batch], name: str, recorder: Recorder) -> None:
        for attribute, value in (("inner", iterable), ("name", name), ("recorder", recorder), ("iterator", None)):
            object.__setattr__(self, f"_loaderkit_{attribute}", value)

    def __iter__(self) -> Iterator[Batch]:
        """One pass over what is watched."""
        inner = self._loaderkit_inner
        found = open_watched(self._loaderkit_recorder, lambda: iter(inner))
        object.__setattr__(self, "_loaderkit_iterator", found if found.gives(inner) else None)
        return found

    def stats(self, since: WatchedStats | None = None) -> WatchedStats:
        """The counters up to now; with `since`, their rise after that moment."""
        stats: WatchedStats = self._loaderkit_recorder.stats(since)
        return stats

    def profile(self) -> Profile:
        """A report on the loop that runs in its `with` block: why it waits, and what to change. As of `Loader.profile`."""
        return Profile(watched_subject(self._loaderkit_recorder, self._loaderkit_name))

    def close(self) -> None:
        """Close what is watched, if it has `close`. Idempotent."""
        close = getattr(self._loaderkit_inner, "close", None)
        if callable(close):
            close()

    def __enter__(self) -> Watched[Batch]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_loaderkit_"):  # not set yet
            raise AttributeError(name)
        return getattr(self._loaderkit_inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loaderkit_inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._loaderkit_inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._loaderkit_inner), "stats", "profile", "close"})

    def __repr__(self) -> str:
        return f"<watched {self._loaderkit_inner!r}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "what is watched cannot be pickled or copied: send the loader itself, and watch it where it is iterated"
        )


class _SizedWatched(Watched[Batch]):
    def __len__(self) -> int:
        return len(self._loaderkit_inner)


class _WithItems(_SizedWatched[Batch]):
    def __getitem__(self, key: Any) -> Any:
        return self._loaderkit_inner[key]


class _WithNext(Watched[Batch]):
    """For an iterable that is an iterator itself: it continues where it is."""

    def __next__(self) -> Batch:
        if self._loaderkit_iterator is None:
            iter(self)
        batch: Batch = next(self._loaderkit_iterator)
        return batch


def watch(iterable: Iterable[Batch], *, name: str | None = None) -> Watched[Batch]:
    """An iterable of the same batches, in the same order, with an account of what the loop waits for.

    loader = loaderkit.watch(DataLoader(dataset, batch_size=64, num_workers=2))
    with loader.profile() as report:
        for batch in loader:
            train(batch)
    print(report)

    `iterable`: a DataLoader, or whatever a loop takes its batches from. No thread is added and no batch copied: it takes some
    microseconds a batch. `stats()`, `profile()` and `close()` are as on a `Loader`, without what cannot be seen from
    outside; all other attributes come from `iterable`. `name` is the reports' name. A `Loader`, which has all of this,
    is returned as it is.
    """
    if issubclass(type(iterable), DataLoaderParts):  # a `Loader`; `isinstance` takes what is watched for one, too
        return cast("Watched[Batch]", iterable)
    if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
        raise TypeError(
            f"a {type(iterable).__name__} cannot be iterated over: watch what your loop takes its batches from"
        )
    own, seen = type(iterable), iterable.__class__  # of what is watched twice, too
    kind: type[Watched[Any]] = Watched
    if hasattr(own, "__next__"):
        kind = _WithNext
    elif hasattr(own, "__getitem__"):
        kind = _WithItems
    elif hasattr(own, "__len__"):
        kind = _SizedWatched
    return kind(iterable, name or name_of(iterable), Recorder(f"{seen.__module__}.{seen.__qualname__}"))


def name_of(iterable: Any) -> str:
    """The name in a report: the class, and the class of the data set."""
    own, dataset = iterable.__class__.__name__, getattr(iterable, "dataset", None)
    return own if dataset is None else f"{own} of {dataset.__class__.__name__}"
