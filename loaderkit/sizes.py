"""What `Loader.resize` was told: checked, given to the engine that runs, and kept for those to come after an error."""

from __future__ import annotations

from typing import Any

from loaderkit.errors import ConfigError
from loaderkit.prefetch.executor import Executor
from loaderkit.schema import parse_bytes


class Sizes:
    """Workers by stage, batches ahead, memory; `tuning` describes how things stand, for the stats."""

    def __init__(self, tuning: dict[str, Any]) -> None:
        self.tuning = tuning
        self._workers: dict[str, int] = {}
        self._depth: tuple[int | None, int | None] = (None, None)

    def set_workers(self, stage: str, workers: int, engine: Executor | None) -> None:
        """Raises ConfigError for a stage there is not, and for one that this executor cannot resize."""
        _check_count("workers", workers)
        pools = self.tuning["pools"]
        pool = next((pool for pool in pools if stage in pool["stages"]), None)
        if pool is None:
            known = ", ".join(name for pool in pools for name in pool["stages"])
            raise ConfigError(f"resize: there is no stage {stage!r}; there are {known}")
        if self.tuning["executor"] == "inline" or "process" in pool:
            where = (
                "one thread beside the loop runs" if "process" in pool else "with executor: inline your own thread runs"
            )
            raise ConfigError(f"resize: {where} {stage!r}, so it has no workers to be more or fewer")
        num_processes = self.tuning.get("processes", 1)
        workers = -(-workers // num_processes) * num_processes  # they have as many each
        if engine is not None:
            engine.resize(stage, workers)
        self._workers[stage] = workers
        pools = [{**one, "workers": workers} if one is pool else one for one in pools]
        self.tuning = {**self.tuning, "pools": pools, "concurrency": sum(one["workers"] for one in pools)}

    def set_depth(self, batches: int | None, memory: int | str | None, engine: Executor | None) -> None:
        """Raises ConfigError, also for memory that holds not even one batch, if that is known already."""
        if batches is not None:
            _check_count("batches", batches, least=self.tuning.get("processes", 1))
        if isinstance(memory, str):
            try:
                memory = parse_bytes(memory)
            except ValueError as error:
                raise ConfigError(f"resize: memory: expected {error}") from None
        if memory is not None:
            _check_count("memory", memory)
        if engine is not None:
            engine.set_depth(batches, memory)
        self._depth = (batches or self._depth[0], memory or self._depth[1])
        self.tuning = {**self.tuning, "batches": batches or self.tuning["batches"]}

    def apply(self, engine: Executor) -> None:
        """Make an engine that has just been made as the last one was."""
        for stage, workers in self._workers.items():
            engine.resize(stage, workers)
        if self._depth != (None, None):
            engine.set_depth(*self._depth)


def _check_count(name: str, value: Any, *, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"resize: {name}: expected a whole number from {least} on, not {value!r}")
