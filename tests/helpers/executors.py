"""The executors, as overrides, and one made without a loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loaderkit import Pipeline
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.engine_factory import make_executor

EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"prefetch.executor": "inline"},
    "thread": {"prefetch.executor": "thread", "prefetch.concurrency": 2},
    "process": {"prefetch.executor": "process", "prefetch.concurrency": 2},
    "two processes": {"prefetch.executor": "process", "prefetch.processes": 2, "prefetch.concurrency": 2},
}


@contextmanager
def executor_of(pipeline: Pipeline, **overrides: Any) -> Iterator[Any]:
    """The executor of a pipeline, not started; closed at the end."""
    plan = compile_pipeline(to_config(pipeline, overrides))
    executor = make_executor(plan)
    try:
        yield executor
    finally:
        executor.close()
        plan.close()
