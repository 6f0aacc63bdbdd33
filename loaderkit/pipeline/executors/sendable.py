"""Finds which objects of a pipeline go to worker processes, and whether they can be sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loaderkit._internal.imports import import_named
from loaderkit._internal.packing import Packed, check_packs, measured
from loaderkit.connectors.base import Connector
from loaderkit.pipeline.config.extensions import kinds_for_workers
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import SOURCES, STAGES


def check_sendable(config: PipelineConfig, connectors: Sequence[Connector | None] = ()) -> None:
    """Raise ConfigError if an object in the config cannot be pickled, or a kind that the program registered."""
    kinds = kinds_for_workers(config)
    registered = {} if kinds is None else {f"loaderkit.extend.register({n!r})": e for n, e in kinds.registered.items()}
    sent = {
        **_objects(config),
        **_args_of_others(config),
        **registered,
        "the connector": [connector for connector in connectors if connector is not None],
    }
    for where, value in sent.items():
        check_packs(
            where,
            value,
            f"the process that loads (prefetch.executor: {config.prefetch.executor})",
            'name a function that makes it, as "package.module:name", which is called there; or use executor: thread',
        )


def sent_objects(config: PipelineConfig, most: int) -> Packed | None:
    """The user's objects as they would be sent now; None if they have more than `most` bytes. Raises the errors of pickle."""
    return measured([_objects(config), _args_of_others(config), named_in_main(config)], most)


def _objects(config: PipelineConfig) -> dict[str, Any]:
    """The user's objects, given directly or by name, by their place in the config."""
    named = {f"sources.{one.name}": (SOURCES[one.kind], one.args) for one in config.members}
    named = named or {"source": (config.kind, config.source)}
    found = {
        f"{name}.{key}": value for name, (kind, args) in named.items() for key, value in kind.objects(args).items()
    }
    for stage in config.all_stages:
        objects = STAGES[stage.kind].objects(stage.args)
        found |= {f"stages.{stage.name}.{key}": value for key, value in objects.items()}
    return found


def _args_of_others(config: PipelineConfig) -> dict[str, Any]:
    """The arguments of kinds that are not ours, which may be any objects, by the place in the config."""
    sources = [(f"sources.{one.name}", one.kind, one.args) for one in config.members]
    sources = sources or [("source", config.source_kind, config.source)]
    args = {name: args for name, kind, args in sources if kind in SOURCES and not SOURCES.is_ours(kind)}
    stages = {f"stages.{one.name}": one.args for one in config.all_stages if not STAGES.is_ours(one.kind)}
    return {f"{name}.{key}": value for name, one in (args | stages).items() for key, value in one}


def named_in_main(config: PipelineConfig) -> dict[str, Any]:
    """What the config names as "__main__:name", which the other process has to be given."""
    texts = [value for value in _objects(config).values() if isinstance(value, str)]
    names = {text.partition(":")[2].partition(".")[0] for text in texts if text.startswith("__main__:")}
    return {name: import_named(f"__main__:{name}") for name in names}
