"""Watches every DataLoader that a script iterates over in its own process. Imports torch only after the script has.

The script imports torch's dataloader ──> its `__iter__` is replaced ──> each DataLoader gets accounts when it is first iterated
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from loaderkit._internal.imports import when_imported

if TYPE_CHECKING:
    from loaderkit.profile.recording import Profile
    from loaderkit.profile.report import Report
    from loaderkit.profile.watched.recorder import Recorder

_CLASSES = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",  # which does not call the other's `__iter__`
}
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", str(Path(__file__).parents[2]))


@dataclass
class _Watching:
    """A DataLoader, or one after another that are the same but for being made anew."""

    recorder: Recorder
    profile: Profile
    loader: weakref.ref[Any]
    key: tuple[Any, ...]


class ScriptLoaders:
    """The DataLoaders of this process, from `begin` on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._watching: list[_Watching] = []
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Watch what is iterated over from now on."""
        for module, name in _CLASSES.items():
            self._undo.append(when_imported(module, functools.partial(self._replace, name)))

    def reports(self, kind: type[BaseException] | None, error: BaseException | None) -> list[Report]:
        """Stop, and give a report for each DataLoader that gave a batch, in the order in which they were begun. `kind` and
        `error`: what ended the script."""
        for undo in self._undo:
            undo()
        self._undo = []
        for one in self._watching:
            one.profile.__exit__(kind, error, None)
        found = [one.profile.result for one in self._watching]
        self._watching = []
        return [report for report in found if report.num_batches]

    def _replace(self, name: str, module: ModuleType) -> None:
        kind = getattr(module, name)
        original = kind.__iter__

        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            return self._iterate(loader, original)

        kind.__iter__ = iterate
        self._undo.append(functools.partial(setattr, kind, "__iter__", original))

    def _iterate(self, loader: Any, original: Callable[[Any], Any]) -> Any:
        if os.getpid() != self._pid:  # in a process that the script has forked
            return original(loader)
        from loaderkit.profile.watched.iterator import WatchedIterator  # torch is there by now

        return WatchedIterator(self._watch(loader).recorder, lambda: original(loader))

    def _watch(self, loader: Any) -> _Watching:
        known = next((one for one in self._watching if one.loader() is loader), None)
        if known is not None:
            return known
        place = _place(sys._getframe(2))
        arguments = ("num_workers", "batch_size", "prefetch_factor", "persistent_workers", "pin_memory")
        key = (place, type(loader), type(loader.dataset), *(getattr(loader, name, None) for name in arguments))
        for one in self._watching:
            if one.key == key and one.loader() is None:  # it was made anew for another epoch
                one.loader = weakref.ref(loader)
                return one
        found = self._begin(loader, place, key)
        self._watching.append(found)
        return found

    def _begin(self, loader: Any, place: str, key: tuple[Any, ...]) -> _Watching:
        from loaderkit.profile.recording import Profile
        from loaderkit.profile.watched.recorder import Recorder
        from loaderkit.profile.watched.subject import watched_subject
        from loaderkit.profile.watched.watch import name_of

        kind = type(loader)
        recorder = Recorder(f"{kind.__module__}.{kind.__qualname__}")
        profile = Profile(watched_subject(recorder, f"{self._name}: {name_of(loader)} ({place})"))
        profile.__enter__()
        return _Watching(recorder, profile, weakref.ref(loader), key)


def _place(frame: Any) -> str:
    """Where the script iterates: the file and the line of the innermost frame that is no library's, else of the outermost."""
    found = frame
    while frame is not None:
        found = frame
        if not any(part in frame.f_code.co_filename for part in _LIBRARIES):
            break
        frame = frame.f_back
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"
