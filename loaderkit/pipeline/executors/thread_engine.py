"""Makes an engine of threads from an `ExecutionPlan`, in this process or in a worker process, and the batches' plan for
it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from loaderkit.connectors.base import traits_of
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.process.shared_memory import Allocator
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.pipeline.batches.assembler import BatchAssembler, BatchShape
from loaderkit.pipeline.batches.contents import contents_of
from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.pipeline.batches.first_samples import specs_of_all_parts, specs_of_first
from loaderkit.pipeline.batches.memory import BatchMemory
from loaderkit.pipeline.batches.padding import Padding
from loaderkit.pipeline.batches.plan import BatchPlan, MakeChunk
from loaderkit.pipeline.config.extensions import Kinds
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.pipeline.run_samples import StageRuns
from loaderkit.samples.chunk import FieldSpec, SampleChunk
from loaderkit.sampling.shard import Shard
from loaderkit.sources.base import Source
from loaderkit.sources.mixture import MixtureSource
from loaderkit.sources.objects.iterable import Pass
from loaderkit.stages.image.formats import set_pillow_limits


def make_thread_engine(plan: ExecutionPlan, clock: Clock, allocator: Allocator | None = None) -> ThreadEngine:
    """An engine of threads of this process; `allocator` gives shared memory."""
    prefetch, compiled = plan.config.prefetch, plan.compiled
    return ThreadEngine(
        make_batch_plan(plan, allocator),
        compiled.stages,
        compiled.pools,
        timeout_s=prefetch.timeout,
        raises=prefetch.on_timeout == "raise",
        clock=clock,
        counters=compiled.counters,
    )


def make_worker_engine(
    plan: ExecutionPlan, reopen: Callable[[], Source] | None, limits: list[Any], allocator: Allocator, shard: Shard
) -> ThreadEngine:
    """The engine of a worker process; `reopen` opens the source there, if it was not sent. `limits`: Pillow's, as they are in
    the trainer's process."""
    set_pillow_limits(limits)
    source = plan.source if reopen is None else reopen()
    return make_thread_engine(replace(plan, source=source, shard=shard), time.perf_counter, allocator)


def with_main(
    of_main: Mapping[str, Any],
    make: Callable[[Allocator, Shard], ThreadEngine],
    allocator: Allocator,
    shard: Shard,
) -> ThreadEngine:
    """The engine of a worker process, whose main module is given what the pipeline names there: "__main__:name"."""
    vars(sys.modules["__main__"]).update(of_main)
    return make(allocator, shard)


def with_kinds(
    kinds: Kinds, make: Callable[[Allocator, Shard], ThreadEngine], allocator: Allocator, shard: Shard
) -> ThreadEngine:
    """The engine of a worker process that knows these kinds. Raises ConfigError."""
    kinds.adopt()
    return make(allocator, shard)


def make_batch_plan(plan: ExecutionPlan, allocator: Allocator | None = None) -> BatchPlan:
    """The batches of a plan; `allocator` gives shared memory."""
    config, compiled, shard, schedule = plan.config, plan.compiled, plan.shard, plan.schedule
    batch, early, order = config.batch, compiled.context.early_stream, plan.order
    mean_samples, most_samples = order.slots_of(schedule.batch_size)
    contents = contents_of(order, plan.source, skips=config.errors.on_bad_sample == "skip")
    shape = BatchShape(
        most_samples,
        Padding(batch.pad_value, batch.padding_side, batch.pad_to_multiple_of or 1, batch.masks),
        config.errors.on_bad_sample,
        has_keys=_names_samples(plan),
        marks_wrapped="__wrapped__" in (config.output or ()) or (schedule.world_size > 1 and not schedule.drop_last),
        filters=config.filters,
        skips_empty=config.skips_empty_batches,
    )
    # A mixture's `read` is several stages; those behind the ones that run here act on batches.
    runs = compiled.context.sample_runs
    look = StageRuns([(stage.name, run) for stage, run in zip(compiled.stages, runs, strict=False)])
    in_order = plan.source.in_order
    return BatchPlan(
        BatchCursor(
            order,
            schedule,
            num_epochs=config.order.epochs,
            shard=shard,
            on_seek=compiled.on_seek,
        ),
        BatchMemory(
            most_samples,
            shard.num_batches(config.prefetch.first_batches),
            shard.num_bytes(config.prefetch.memory),
            shard=shard,
            pinned_for=plan.pinned_for or compiled.device,
            allocator=allocator,
            mean_samples=mean_samples,
            num_tokens=batch.tokens if order.unit == "batches" else None,
        ),
        BatchAssembler(
            partial(order.keys, keys_of=plan.source.keys),
            shape,
            contents.count_sources,
            None if early is None else early.run,
        ),
        key=plan.source.key,
        find_specs=_find_specs(plan, SampleChunk if order.unit == "samples" else contents.make_single, look),
        preparing=look.place,
        make_chunk=contents.make_chunk,
        make_single=contents.make_single,
        sources_of=contents.sources_of,
        aligned=contents.aligned,
        batch_size=mean_samples,
        whole_chunks=compiled.lowering is not None,
        begin_pass=None if in_order is None else partial(in_order.begin_pass, schedule=schedule, shard=shard),
    )


def _find_specs(
    plan: ExecutionPlan, make_single: MakeChunk, run: StageRuns
) -> Callable[[Pass | None], Mapping[str, FieldSpec]]:
    """How the fields of a batch are found."""
    specs_of = plan.compiled.specs_of
    num_tries = 16 + plan.config.errors.max_bad_samples
    if isinstance(plan.source, MixtureSource):
        # With one worker the user's functions are called by one thread.
        at_once = [
            part.name
            for part, connector in zip(plan.source.parts, plan.connectors, strict=True)
            if plan.num_workers > 1 and connector is not None and traits_of(connector).is_remote
        ]
        find = partial(specs_of_all_parts, num_tries=num_tries, make_chunk=make_single, at_once=at_once)
        return partial(find, plan.source, run, specs_of)
    return partial(specs_of_first, plan.source, run, specs_of, num_tries=num_tries, make_chunk=make_single)


def _names_samples(plan: ExecutionPlan) -> bool:
    """True if the loop or a batch stage gets the keys of a batch."""
    output = plan.config.output
    return output is None or "__key__" in output or any(stage.scope == "batch" for stage in plan.compiled.stages)
