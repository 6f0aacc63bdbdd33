"""Watches every DataLoader that a script iterates over in its own process. Imports torch only after the script has.

The script imports torch's dataloader ──> its `__iter__` is replaced ──> each DataLoader gets accounts when it is first iterated
                                                              and its lines are sampled, in its workers as well
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit._internal.imports import when_imported

if TYPE_CHECKING:
    from loaderkit.profile.recording import Profile
    from loaderkit.profile.report import Report
    from loaderkit.profile.watched.recorder import Recorder
    from loaderkit.profile.watched.sampling import Sampler
    from loaderkit.profile.watched.step_cpu import StepCpu

Iterate = Callable[[Any, Callable[[Any], Any]], Any]
"""(DataLoader, its own `__iter__`) -> an iterator."""

_CLASSES = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",  # which does not call the other's `__iter__`
}
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", f"{Path(__file__).parents[2]}{os.sep}")
_ARGUMENTS = ("num_workers", "batch_size", "prefetch_factor", "persistent_workers", "pin_memory", "drop_last")


@dataclass
class _Watching:
    """A DataLoader, or several in a row that are the same one made again."""

    recorder: Recorder
    profile: Profile
    loader: weakref.ref[Any]
    key: tuple[Any, ...]
    dataset: _Identity
    num_datasets: int = 1
    noted: Any = None

    def loop(self) -> ScriptLoop:
        """Its report, and what was noted of it."""
        return ScriptLoop(self._report(), self.noted, self.recorder.step_cpu)

    def _report(self) -> Report:
        """Its report, which says so if several data sets are taken together in it."""
        report = self.profile.result
        if self.num_datasets == 1:
            return report
        name = f"{report.name.removesuffix(')')}, {self.num_datasets} data sets)"
        return report.model_copy(update={"name": name, "config": {**report.config, "name": name}})


class ScriptLoop(NamedTuple):
    """A loop of the script over one DataLoader, when the script is over."""

    report: Report
    noted: Any  # what `note` gave of the DataLoader when it was first iterated over
    step_cpu: StepCpu | None  # of its steps; None if there was no `note`


class _Identity:
    """Remembers which object it was, without keeping the object alive."""

    def __init__(self, value: Any) -> None:
        self._id, self._ref, self._kind = id(value), None, _kind_of(value)
        with contextlib.suppress(TypeError):  # of a list there are no weak references
            self._ref = weakref.ref(value)

    def is_of(self, value: Any) -> bool:
        if self._ref is not None:
            return self._ref() is value
        return self._id == id(value) and self._kind == _kind_of(value)  # else its place in memory is another one's now

    def may_be_gone(self, value: Any) -> bool:
        """True if the object is gone, so that `value` may be the same one made again. For a list or the like that
        cannot be known, so it is assumed of a list of the same length."""
        return self._kind == _kind_of(value) if self._ref is None else self._ref() is None


def _kind_of(value: Any) -> tuple[type, int | None]:
    return type(value), len(value) if isinstance(value, (list, tuple, dict)) else None


class ScriptLoaders:
    """The DataLoaders of this process, from `begin` on."""

    def __init__(self, name: str, note: Callable[[Any], Any] | None = None) -> None:
        """`note` is called with each DataLoader before it is iterated over for the first time, and must not touch its
        samples."""
        self._name, self._note = name, note
        self._pid = os.getpid()
        self._watching: list[_Watching] = []
        self._undo: Callable[[], None] = lambda: None
        self._sampler: Sampler | None = None

    def begin(self) -> None:
        """Watch what is iterated over from now on."""
        self._undo = on_iteration(self._iterate)

    def loops(self, kind: type[BaseException] | None, error: BaseException | None) -> list[ScriptLoop]:
        """Stop, and give each DataLoader that was iterated over, in the order in which they were begun. `kind` and `error`:
        what ended the script."""
        self._undo()
        if self._sampler is not None:
            self._sampler.end()
        for one in self._watching:
            one.profile.__exit__(kind, error, None)
        found = [one.loop() for one in self._watching]
        self._watching = []
        return found

    def _iterate(self, loader: Any, original: Callable[[Any], Any]) -> Any:
        if os.getpid() != self._pid:  # in a process that the script has forked
            return original(loader)
        from loaderkit.profile.watched.iterator import open_watched  # torch is there by now

        recorder = self._watch(loader).recorder
        lines = recorder.lines
        return open_watched(
            recorder, lambda: original(loader) if lines is None else lines.open_workers(loader, original)
        )

    def _watch(self, loader: Any) -> _Watching:
        known = next((one for one in self._watching if one.loader() is loader), None)
        if known is not None:
            return known
        lines = script_lines(sys._getframe(2))
        kinds = (type(part) for part in (loader, loader.dataset, loader.sampler, loader.batch_sampler))
        key = (*lines, *kinds, *(getattr(loader, name, None) for name in _ARGUMENTS))
        found = self._earlier(loader, key)
        if found is not None:
            found.loader = weakref.ref(loader)
            return found
        found = self._begin(loader, f"{Path(lines[0][0]).name}:{lines[0][1]}", key)
        self._watching.append(found)
        return found

    def _earlier(self, loader: Any, key: tuple[Any, ...]) -> _Watching | None:
        """The earlier DataLoader that this one replaces in another epoch: it was over the same data set, or over one
        that was made again as well."""
        gone = [one for one in self._watching if one.key == key and one.loader() is None]
        for one in gone:
            if one.dataset.is_of(loader.dataset):
                return one
        found = next((one for one in gone if one.dataset.may_be_gone(loader.dataset)), None)
        if found is not None:
            found.dataset, found.num_datasets = _Identity(loader.dataset), found.num_datasets + 1
        return found

    def _begin(self, loader: Any, place: str, key: tuple[Any, ...]) -> _Watching:
        from loaderkit.profile.recording import Profile
        from loaderkit.profile.watched.lines import LoaderLines
        from loaderkit.profile.watched.recorder import Recorder
        from loaderkit.profile.watched.step_cpu import StepCpu
        from loaderkit.profile.watched.subject import watched_subject
        from loaderkit.profile.watched.watch import name_of

        kind = type(loader)
        recorder = Recorder(f"{kind.__module__}.{kind.__qualname__}")
        recorder.lines = LoaderLines(self._sampler_of_process, (sys.path[0], os.getcwd()))
        profile = Profile(watched_subject(recorder, f"{self._name}: {name_of(loader)} ({place})"))
        watching = _Watching(recorder, profile, weakref.ref(loader), key, _Identity(loader.dataset))
        if self._note is not None:
            watching.noted, recorder.step_cpu = self._note(loader), StepCpu()
        profile.__enter__()
        return watching

    def _sampler_of_process(self) -> Sampler:
        """One for all loaders: they load one after another, in one thread."""
        from loaderkit.profile.watched.sampling import Sampler

        if self._sampler is None:
            self._sampler = Sampler()
            self._sampler.begin()
        return self._sampler


def on_iteration(iterate: Iterate) -> Callable[[], None]:
    """Call `iterate` in the place of each DataLoader's `__iter__` from now on, once torch is imported. Returns what takes it
    back."""
    undo: list[Callable[[], None]] = []

    def replace(name: str, module: ModuleType) -> None:
        kind = getattr(module, name)
        original = kind.__iter__

        @functools.wraps(original)
        def open_iterator(loader: Any) -> Any:
            return iterate(loader, original)

        kind.__iter__ = open_iterator
        undo.append(functools.partial(setattr, kind, "__iter__", original))

    for module, name in _CLASSES.items():
        undo.append(when_imported(module, functools.partial(replace, name)))

    def take_back() -> None:
        for one in undo:
            one()

    return take_back


def script_lines(frame: Any) -> list[tuple[str, int]]:
    """Files and lines of the frames that belong to no library, innermost first: where the script iterates, and where
    that is called. If there is none, the file and line of the outermost frame."""
    found, outermost = [], ("", 0)
    while frame is not None:
        outermost = (frame.f_code.co_filename, frame.f_lineno)
        if not any(part in outermost[0] for part in _LIBRARIES):
            found.append(outermost)
        frame = frame.f_back
    return found or [outermost]
