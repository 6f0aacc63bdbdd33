"""The current number of workers, batches and processes: from the config, from `Loader.resize` or from the tuner.

The running engine gets every change, and a new engine after an error starts with them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from loaderkit._internal.system.cgroups import num_cpus, num_cpus_of_rank
from loaderkit._internal.units import parse_bytes
from loaderkit.engine.autotune.tuned_setting import Move, TunedSetting
from loaderkit.engine.autotune.tuner import BATCHES_EACH, Tuner
from loaderkit.engine.contracts import Executor
from loaderkit.engine.metrics.snapshot import Snapshot
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.errors import ClosedError, ConfigError, WorkerDiedError
from loaderkit.pipeline.config.model import PipelineConfig, PrefetchArgs

_MOST_ACTORS = 1024
logger = logging.getLogger("loaderkit")


class LiveSettings:
    """Workers by stage, batches ahead, memory and processes; `tuning` describes them for the stats.

    One lock orders changes by the user, the tuner and a new engine, and is held while the engine makes them; `tuning` takes
    none.
    """

    def __init__(self, tuning: Tuning, tuner: Tuner | None) -> None:
        self._first = self._tuning = tuning
        self._tuner = tuner
        self._lock = threading.Lock()
        self._engine: Executor | None = None
        self._workers: dict[str, int] = {}
        self._wanted = {pool.stages[0]: pool.workers for pool in tuning.pools}  # workers, before they are shared out
        settings = tuner.settings if tuner is not None and tuner.cpus_each else ()  # each process brings CPUs
        self._scaled = {one.stages[0] for one in settings if one.kind == "workers"}  # with the processes
        self._batches = tuning.batches or 0  # ahead, before there are more for more processes
        self._last_move: Move | None = None
        self._refusal: str | None = None  # by the engine, of the number of processes, later
        self._depth: tuple[int | None, int | None] = (None, None)
        self.has_users_workers = False  # `set` has set some

    @property
    def tuning(self) -> Tuning:
        """The settings at this moment."""
        tuner = self._tuner
        if tuner is None:
            return self._tuning
        decisions = [decision.to_dict() for decision in tuner.decisions.copy()]
        auto = tuple(setting.name for setting in tuner.settings)
        return replace(self._tuning, auto=auto, settled=tuner.is_settled, decisions=decisions)

    def begin_with(self, processes: int) -> None:
        """Begin with that many processes, before an engine is attached."""
        if self._tuner is not None and processes != self._num_processes:
            self._set_processes(processes)

    def attach(self, engine: Executor) -> None:
        """Apply the current settings to a new engine, and every later change as well."""
        with self._lock:
            if self._tuning.processes is not None and self._tuning.processes != self._first.processes:
                engine.set_processes(self._tuning.processes, self._note_refusal)
            for stage, workers in self._workers.items():
                engine.resize(stage, workers)
            if self._depth != (None, None):
                engine.set_depth(*self._depth)
            self._engine = engine

    def detach(self) -> None:
        """Forget the engine, which ends. Takes no lock: in a fork's child it may be held for ever."""
        self._engine = None

    def set(self, stage: str | None, workers: int | None, batches: int | None, memory: int | str | None) -> None:
        """Set values for the user; the tuner no longer changes them. Raises ConfigError for an unknown stage, for a
        stage that this executor cannot resize, where the system has no more threads, and for memory that holds not even
        one batch, if the size of a batch is known."""
        if (stage is None) != (workers is None):
            raise ConfigError("resize: give a stage together with its workers")
        if workers is not None:
            _check_count("workers", workers)
        if batches is not None:
            _check_count("batches", batches, least=self._num_processes)
        num_bytes = None if memory is None else _to_bytes(memory)
        pool = None if stage is None else self._pool_of(stage)
        with self._lock:
            if stage is not None and workers is not None and pool is not None:
                self.has_users_workers = True
                self._set_workers(stage, pool.stages, workers)
                if self._tuner is not None:
                    self._tuner.forget(pool.stages)
            if batches is not None or num_bytes is not None:
                self._set_depth(batches, num_bytes)
                if batches is not None and self._tuner is not None:
                    self._tuner.forget(())

    def tune(self, stats: Snapshot) -> None:
        """Show the tuner a snapshot and make the change that it decides on."""
        if self._tuner is None:
            return
        with self._lock:
            if self._engine is None:
                return
            if self._refusal is not None and self._last_move is not None:
                self._refuse(self._last_move, self._refusal)
                return
            move = self._tuner.look(stats)
            if move is None:
                return
            self._last_move, self._refusal = move, None
            stages = move.setting.stages
            try:
                if move.setting.kind == "processes":
                    self._set_processes(move.value)
                elif stages:
                    self._set_workers(stages[0], stages, move.value)
                else:
                    self._set_depth(move.value, None)
            except (ConfigError, WorkerDiedError) as error:
                self._refuse(move, str(error))

    def _refuse(self, move: Move, reason: str) -> None:
        """Take back a move of the tuner that could not be made."""
        assert self._tuner is not None
        self._refusal = self._last_move = None
        self._tuner.refused(move, reason)
        if move.setting.kind == "processes":
            self._set_processes(move.before)
        logger.warning("the tuner could not set %s to %d: %s", move.setting.name, move.value, reason)

    def _note_refusal(self, reason: str) -> None:
        """Called by the engine, in any thread, when it cannot have as many processes as it was told."""
        self._refusal = reason

    def written_to(self, config: PipelineConfig) -> PipelineConfig:
        """The config with the current settings. When it is read again, pools without `workers` share `concurrency` evenly,
        whatever each has now."""
        tuning = self._tuning
        memory = self._depth[1] or config.prefetch.memory
        update: dict[str, Any] = {"batches": tuning.batches, "memory": memory}
        if config.prefetch.processes == "auto" and tuning.processes is not None:
            update |= {"processes": tuning.processes, "max_processes": None}
        own_pools = [pool for pool in tuning.pools if not pool.is_trainers]
        own = {name.partition(".")[0]: pool.workers for pool in own_pools for name in pool.stages}
        if tuning.executor != "inline" and own_pools:
            update["concurrency"] = sum(pool.workers for pool in own_pools)
        stages = tuple(
            stage
            if stage.args.workers == "auto" or stage.name not in own
            else replace(stage, args=stage.args.model_copy(update={"workers": own[stage.name]}))
            for stage in config.stages
        )
        return replace(config, stages=stages, prefetch=config.prefetch.model_copy(update=update))

    def _apply(self, change: Callable[[Executor], None]) -> None:
        engine = self._engine
        if engine is None:
            return
        try:
            change(engine)
        except ClosedError:
            if self._engine is engine:
                raise
            # The engine has ended meanwhile, after an error: the next one gets the change.

    def _set_processes(self, num: int) -> None:
        """Set the number of processes, and with it the totals: each process has equally many workers, and batches ahead
        of its own."""
        assert self._tuner is not None
        self._apply(lambda engine: engine.set_processes(num, self._note_refusal))
        if each := self._tuner.cpus_each:
            self._tuning = replace(self._tuning, cpus=max(1, int(num * each)))
        for stage in self._scaled:
            self._wanted[stage] = num * -(-self._wanted[stage] // self._num_processes)
        self._tuning = replace(self._tuning, processes=num)
        pools = tuple(
            pool if pool.is_trainers else replace(pool, workers=self._shared_out(self._wanted[pool.stages[0]]))
            for pool in self._tuning.pools
        )
        self._tuning = replace(self._tuning, pools=pools)
        if any(setting.kind == "batches" for setting in self._tuner.settings):
            self._tell_depth(max(self._batches, BATCHES_EACH * num), None)
        workers = {pool.stages[0]: pool.workers for pool in pools}
        self._tuner.rescale(num, workers, self._tuning.batches)

    @property
    def _num_processes(self) -> int:
        return self._tuning.processes or 1

    def _shared_out(self, workers: int) -> int:
        return -(-workers // self._num_processes) * self._num_processes  # each process has the same number

    def _set_workers(self, stage: str, stages: Sequence[str], workers: int) -> None:
        self._wanted[stages[0]] = workers
        workers = self._shared_out(workers)
        stage = stage if stage in stages else stages[0]
        self._apply(lambda engine: engine.resize(stage, workers))
        self._workers[stages[0]] = workers
        pools = self._tuning.pools
        resized = tuple(replace(pool, workers=workers) if stage in pool.stages else pool for pool in pools)
        self._tuning = replace(self._tuning, pools=resized)

    def _set_depth(self, batches: int | None, memory: int | None) -> None:
        self._tell_depth(batches, memory)
        self._batches = batches or self._batches

    def _tell_depth(self, batches: int | None, memory: int | None) -> None:
        self._apply(lambda engine: engine.set_depth(batches, memory))
        self._depth = (batches or self._depth[0], memory or self._depth[1])
        self._tuning = replace(self._tuning, batches=batches or self._tuning.batches)

    def _pool_of(self, stage: str) -> PoolTuning:
        pool = self._tuning.pool_of(stage)
        if pool is None and self._tuning.reader is not None:
            raise ConfigError(f"resize: rank {self._tuning.reader} reads for this rank: resize {stage!r} there")
        if pool is None:
            known = ", ".join(name for pool in self._tuning.pools for name in pool.stages)
            raise ConfigError(f"resize: there is no stage {stage!r}; there are {known}")
        if pool.is_trainers:
            raise ConfigError(
                f"resize: one thread beside the loop runs {stage!r}, so it has no workers to be more or fewer"
            )
        if self._tuning.executor == "inline":
            reason = self._tuning.executor_reason
            change = f": {reason}; set prefetch.concurrency to a number" if reason else ""
            raise ConfigError(
                f"resize: with executor: inline your own thread runs {stage!r}, so it has no workers to be more or "
                f"fewer{change}"
            )
        return pool


def make_tuner(config: PipelineConfig, tuning: Tuning) -> Tuner | None:
    """The tuner of the settings that are `auto`; None if there are none, and for inline."""
    if tuning.executor == "inline" or all(pool.is_trainers for pool in tuning.pools):
        return None
    unit = tuning.processes or 1  # each worker process has the same number
    settings = [
        TunedSetting(f"workers of {'+'.join(pool.stages)}", pool.stages, pool.workers, unit=unit)
        for pool in tuning.pools
        if is_tuned(config, pool)
    ]
    if config.prefetch.batches == "auto" and tuning.batches is not None:
        settings.append(TunedSetting("batches", (), tuning.batches, unit=unit, kind="batches"))
    if config.prefetch.processes == "auto" and tuning.processes is not None:
        settings.append(TunedSetting("processes", (), tuning.processes, kind="processes"))
    if not settings:
        return None
    each = config.prefetch.ray.num_cpus if config.prefetch.executor == "ray" else 0.0
    return Tuner(
        settings, config.stage("batch").name, tuning.cpus or num_cpus(), _most_processes(config.prefetch), each
    )


def is_tuned(config: PipelineConfig, pool: PoolTuning) -> bool:
    """True if the tuner sets the workers of a pool: neither their total nor the number for one of its stages is given."""
    fixed = {stage.name for stage in config.stages if stage.args.workers != "auto"}
    is_free = fixed.isdisjoint(name.partition(".")[0] for name in pool.stages)
    return config.prefetch.concurrency == "auto" and is_free and not pool.is_trainers


def _most_processes(prefetch: PrefetchArgs) -> Callable[[int], int]:
    """A function that says, given the present number of processes, how many there may be now."""
    if prefetch.executor != "ray":
        most = prefetch.max_processes or num_cpus_of_rank()
        return lambda num: most
    # Late: the package is an extra.
    from loaderkit.engine.ray.cluster import RaySettings, num_that_fit

    settings = RaySettings(**dict(prefetch.ray))
    return lambda num: min(prefetch.max_processes or _MOST_ACTORS, num + num_that_fit(settings))


def _to_bytes(memory: int | str) -> int:
    if isinstance(memory, str):
        try:
            memory = parse_bytes(memory)
        except ValueError as error:
            raise ConfigError(f"resize: memory: expected {error}") from None
    _check_count("memory", memory)
    return memory


def _check_count(name: str, value: Any, *, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"resize: {name}: expected a whole number from {least} on, not {value!r}")
