"""Checks whether user code gives in several threads what it gives in one, by the first samples, for `loaderkit check`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from loaderkit._internal.compare import differ
from loaderkit.pipeline.compiler import compile_stages
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.pipeline.run_samples import StageRuns, chunk_of, run_samples
from loaderkit.stages.base import StageConfig
from loaderkit.stages.call import CallArgs

_NUM_THREADS, _NUM_ROUNDS = 4, 4
_MOST_SAMPLES, _LEAST_SAMPLES, _MOST_S = 32, 4, 0.5  # s for all of them, alone
_SWITCH_S = 1e-5  # between threads; Python's 5 ms is longer than most items take


class SideBySide(NamedTuple):
    """`stages` run user code before `batch`; of these `declared` are `thread_safe`. `fields` had other values in
    several threads than in one, and `error` is an error that was raised only in several."""

    stages: list[str]
    declared: list[str]
    fields: list[str]
    error: str | None


def compare_side_by_side(plan: ExecutionPlan) -> SideBySide | None:
    """The first samples, made alone, twice, then in several threads at once. None if there is no user code before
    `batch`, or if it belongs to an iterable or is seeded, as such code never runs so. Fields that already differ alone
    are ignored."""
    context = plan.compiled.context
    core = plan.order.core
    if core.sources or plan.order.unit == "sequences" or plan.config.kind.is_stream or context.is_seeded:
        return None
    users = [
        stage for stage in context.before_batch if STAGES[stage.kind].runs_user_code or not STAGES.is_ours(stage.kind)
    ]
    declared = [stage.name for stage in users if _is_declared(stage)]
    names = [stage.name for stage in users]
    if plan.source.runs_user_code:
        names.insert(0, context.stages[0].name)
        if plan.source.owner is None:
            declared.insert(0, context.stages[0].name)
    if not names:
        return None
    alone: list[Mapping[str, Any] | Exception] = []
    number = 0
    begin_s = time.perf_counter()
    while number < min(len(plan.source), _MOST_SAMPLES):
        if number >= _LEAST_SAMPLES and time.perf_counter() - begin_s > _MOST_S:
            break
        alone += _made(plan, [number])
        number += 1
    again = list(_made(plan, range(len(alone))))
    if any(isinstance(one, Exception) for one in (*alone, *again)):
        return None  # it is bad in any case, which the batch has said
    fields, error = set(), None
    free = _without_locks(plan)
    with _switching():
        numbers = [number for number in range(len(alone)) for _ in range(_NUM_ROUNDS)]
        for number, made in zip(numbers, _made(free, numbers, _NUM_THREADS), strict=True):
            if isinstance(made, Exception):
                error = error or str(made)
                continue
            first, second = alone[number], again[number]
            assert isinstance(first, Mapping)
            assert isinstance(second, Mapping)
            fields |= {
                name
                for name, value in first.items()
                if differ(value, made.get(name)) and not differ(value, second.get(name))
            }
    return SideBySide(names, declared, sorted(fields), error)


def _is_declared(stage: StageConfig) -> bool:
    if isinstance(stage.args, CallArgs):
        return stage.args.thread_safe is True
    return not STAGES[stage.kind].runs_user_code


def _made(plan: ExecutionPlan, numbers: Iterable[int], num_threads: int = 0) -> Iterator[Mapping[str, Any] | Exception]:
    """Samples as `batch` gets them, empty for dropped samples, or the error for failed ones."""
    stages = plan.compiled.stages[: len(plan.compiled.context.before_batch)]
    run = StageRuns([(one.name, one.run) for one in stages], in_turn=any(one.in_turn for one in stages))
    chunks = (chunk_of(np.array([number], np.int64)) for number in numbers)
    prefetch = plan.config.prefetch
    with closing(run_samples(run, chunks, num_threads=num_threads, prefetch=prefetch, key=plan.source.key)) as made:
        for chunk in made:
            yield chunk.failures.get(0) or chunk.samples[0] or {}


def _without_locks(plan: ExecutionPlan) -> ExecutionPlan:
    """The same plan, but with all user code allowed to run in several threads."""
    source = copy(plan.source)
    source.owner = None
    stages = tuple(
        replace(stage, args=stage.args.model_copy(update={"thread_safe": True}))
        if isinstance(stage.args, CallArgs)
        else stage
        for stage in plan.config.stages
    )
    free = replace(plan, source=source, config=replace(plan.config, stages=stages))
    free.__dict__["compiled"] = compile_stages(free)
    return free


@contextmanager
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
