"""`loaderkit.start`: a checkpoint is restored while the loader lists its source and makes its first batches.

    this thread   manager.restore ──── plain values ─────── tensors ───────────────────┐
                                       │ the loader's state                            ├─> Run
    a thread      imports, listing, indexes ──> load_state_dict ──> start: batches ────┘

What comes out is what `build`, `restore` and `load_state_dict` give one after the other. The loader's state is read before any
tensor, so its first batches are those of the restored position; should another checkpoint be taken in the end, as the first
one turned out to be damaged, they are dropped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from loaderkit._internal.compare import differ
from loaderkit.checkpoint.manager.manager import CheckpointManager
from loaderkit.checkpoint.state import ExpectsState
from loaderkit.connectors.base import Connector
from loaderkit.errors import ConfigError
from loaderkit.sampling.state import State

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from loaderkit.loader import Loader
    from loaderkit.pipeline.config.builder import Pipeline


def start(
    pipeline: str | Path | Mapping[str, Any] | Pipeline,
    checkpoints: CheckpointManager | str | os.PathLike[str] | Mapping[str, Any],
    into: dict[str, Any],
    *,
    key: str | None = "loader",
    step: SupportsIndex | None = None,
    strict: bool | Mapping[str, str | Iterable[str]] = True,
    rename: Mapping[str, str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: DeviceMesh | None = None,
    data_dims: str | Sequence[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    connectors: Mapping[str, Connector] | None = None,
) -> Run:
    """Restore `into` in place from the newest whole checkpoint, or from that of `step`, and meanwhile build the loader of
    `pipeline` and make its first batches.

    with loaderkit.start("pipeline.yaml", checkpoints, state) as run:
        for step, batch in enumerate(run.loader, (run.step or 0) + 1):
            ...
            checkpoints.save(step, state)

    `into` gets the loader as `into[key]`, so that it is saved with the rest; with `key=None` it is no part of the state, and
    begins at the beginning. `checkpoints` is a `CheckpointManager`, which stays open, or what one is made of; that one is
    `run.checkpoints`, and closed with the run. What a pipeline calls to be built, such as a data set's class, runs in another
    thread. `strict` and `rename` are those of `checkpoints.restore`, the other arguments those of `build`. All ranks call it,
    as they call `restore`. The block closes the loader.

    The result is that of `build`, then `checkpoints.restore(into, step)`, and so are the errors; but the state may have been
    restored when building fails. An error of either ends both. Raises ConfigError, SourceError, CheckpointError, StateError,
    FormatError, ConnectorError, PeerError.
    """
    if not isinstance(into, dict) or (key is not None and key in into):
        problem = f"has the key {key!r} already" if isinstance(into, dict) else f"is a {type(into).__name__}"
        raise ConfigError(
            f"into {problem}: give a dict of what is restored beside the loader, which `start` builds and puts there under "
            "`key`"
        )
    begin_s = time.perf_counter()
    with ExitStack() as opened:
        if not isinstance(checkpoints, CheckpointManager):
            checkpoints = opened.enter_context(CheckpointManager(checkpoints, connectors=connectors))
        place = _LoaderPlace()
        building = _Building(
            partial(
                _build,
                pipeline,
                rank=rank,
                world_size=world_size,
                mesh=mesh,
                data_dims=data_dims,
                overrides=overrides,
                connectors=connectors,
            ),
            place,
            is_restored=key is not None,
        )
        try:
            spans = [_Spanned("open the checkpoints", begin_s, time.perf_counter())]
            restore = partial(checkpoints.restore, into, step, strict=strict, rename=rename)
            restored = restore() if key is None else _with_place(restore, into, key, place)
            done_s, known_s = time.perf_counter(), place.known_s or spans[0].end_s
            spans.append(_Spanned("restore", spans[0].end_s, done_s))
            spans.append(_Spanned("describe the checkpoint", spans[0].end_s, known_s))
            spans.append(_Spanned("read the tensors", known_s, done_s))
            loader = building.finish(has_state=restored is not None and key is not None)
        except BaseException:
            building.abandon()
            raise
        opened.push(loader)
        if key is not None:
            into[key] = loader
        spans.append(_Spanned("wait for the loader", done_s, time.perf_counter()))
        times = {one.name: (one.begin_s - begin_s, one.end_s - begin_s) for one in [*spans, *building.spans]}
        return Run(loader, restored, checkpoints, times, opened.pop_all())


@dataclass(frozen=True)
class _Spanned:
    """What took from `begin_s` to `end_s`, seconds of `time.perf_counter`."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Run:
    """A training run that has been started. A context manager, which closes the loader.

    `loader`: placed behind the last batch that was trained on. `step`: that was restored; None: there is none. `times`: what
    starting took, name -> (begin, end) in seconds since `start` was called.
    """

    loader: Loader
    step: int | None
    checkpoints: CheckpointManager
    times: Mapping[str, tuple[float, float]]
    _opened: ExitStack

    def close(self) -> None:
        """Close the loader, and the manager that `start` has made. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)


class _LoaderPlace(ExpectsState):
    """Stands for the loader in the state that is restored, as that is still being built."""

    def __init__(self) -> None:
        self.expected: SimpleQueue[Any] = SimpleQueue()  # states, and last None
        self.restored: Any = None
        self.failure: BaseException | None = None  # of building
        self.known_s: float | None = None  # when the state was known

    def state_dict(self) -> dict[str, Any]:
        """One of a loader, none of whose values counts."""
        return State(0, 0, 0, {}).to_dict()

    def expect_state(self, state: Any) -> None:
        """Called before tensors are read. Raises what building has met by then."""
        if self.failure is not None:
            raise self.failure
        self.known_s = time.perf_counter()
        self.expected.put(state)

    def load_state_dict(self, state: Any) -> None:
        """Called once all is read."""
        self.restored = state


class _Building:
    """A thread that builds the loader, and starts it once its state is known."""

    def __init__(self, build: Callable[[list[_Spanned]], Loader], place: _LoaderPlace, *, is_restored: bool) -> None:
        self.spans: list[_Spanned] = []
        self._is_restored = is_restored
        self._build, self._place = build, place
        self._loader: Loader | None = None
        self._applied: Any = None
        # A thread begins on the first GPU, whatever this one was told.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, name="loaderkit-start", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            self._loader = self._build(self.spans)
            if not self._is_restored:
                self._loader.start()
        except BaseException as error:
            self._place.failure = error
            return
        while (state := self._place.expected.get()) is not None:
            with suppress(Exception):  # it may be that of a damaged checkpoint; `finish` raises it if it was the last
                begin_s, self._applied = time.perf_counter(), None
                self._loader.load_state_dict(state)
                self._loader.start()
                self._applied = state
                self.spans.append(_Spanned("begin to make batches", begin_s, time.perf_counter()))

    def finish(self, *, has_state: bool) -> Loader:
        """The loader at its place, with batches on their way. Raises what building it has raised."""
        place = self._place
        place.expected.put(None)
        self._thread.join()
        if place.failure is not None:
            raise place.failure
        assert self._loader is not None
        if has_state and differ(self._applied, place.restored):
            self._loader.load_state_dict(place.restored)
        self._loader.start()
        return self._loader

    def abandon(self) -> None:
        """End the thread, and close the loader."""
        self._place.expected.put(None)
        self._thread.join()
        if self._loader is not None:
            self._loader.close()


def _build(pipeline: Any, spans: list[_Spanned], **arguments: Any) -> Loader:
    begin_s = time.perf_counter()
    from loaderkit.loader import build  # a second, beside the first requests for the checkpoint

    spans.append(_Spanned("import", begin_s, time.perf_counter()))
    loader = build(pipeline, **arguments)
    spans.append(_Spanned("build the loader", spans[-1].end_s, time.perf_counter()))
    return loader


def _with_place(restore: Callable[[], int | None], into: dict[str, Any], key: str, place: _LoaderPlace) -> int | None:
    """`restore` with `place` in the state."""
    into[key] = place
    try:
        return restore()
    finally:
        del into[key]
