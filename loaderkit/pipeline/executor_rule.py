"""Decides where `executor: auto` begins: in threads, or in worker processes if functions are seeded."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from loaderkit._internal.config.diagnostics import Problems
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig, PrefetchArgs
from loaderkit.pipeline.config.validation import check_structure
from loaderkit.pipeline.executors.sendable import check_sendable

logger = logging.getLogger("loaderkit")


def in_processes(config: PipelineConfig) -> PipelineConfig:
    """The config with `executor: process`; settings of processes that it does not give are left to the tuner. Raises
    ConfigError if a stage cannot run there."""
    prefetch, given = config.prefetch, config.prefetch.model_fields_set
    update: dict[str, Any] = {"executor": "process"}
    if "processes" not in given and not config.kind.is_stream:  # of which each reads all
        update["processes"] = "auto"
        if "batches" not in given:
            update["batches"] = "auto"
    prefetch = PrefetchArgs.model_validate({name: getattr(prefetch, name) for name in given} | update)
    problems = Problems(None)
    check_structure(config.source, config.stages, config.order, prefetch, problems)
    problems.raise_problems()
    return replace(config, prefetch=prefetch)


def with_executor(config: PipelineConfig) -> PipelineConfig:
    """The config to begin with. While a seeded function runs, no other code may draw from the process's generators, so
    such a pipeline begins in processes, or inline if it cannot be sent."""
    if config.prefetch.executor != "auto" or config.executor_with_workers != "process":
        return config
    try:
        changed = in_processes(config)
        check_sendable(changed)
    except ConfigError as error:
        logger.warning("a seeded function runs in next(), and nothing is read ahead: %s", error)
        return replace(config, prefetch=config.prefetch.model_copy(update={"executor": "inline"}))
    return changed
