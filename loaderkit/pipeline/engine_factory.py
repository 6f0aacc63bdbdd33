"""From an `ExecutionPlan` to the executor that its config asks for."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any

from loaderkit import native
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.connectors.base import traits_of
from loaderkit.engine.contracts import Executor
from loaderkit.engine.inline import InlineEngine
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.engine.metrics.worker_clock import Clock
from loaderkit.engine.process.shared_memory import Allocator
from loaderkit.engine.threaded import ThreadEngine
from loaderkit.pipeline.batches.assembler import BatchAssembler, BatchShape
from loaderkit.pipeline.batches.cursor import BatchCursor
from loaderkit.pipeline.batches.first_samples import Look, specs_of_all_parts, specs_of_first
from loaderkit.pipeline.batches.memory import BatchMemory
from loaderkit.pipeline.batches.packing import document_chunk, packed_chunk
from loaderkit.pipeline.batches.plan import BatchPlan, MakeChunk
from loaderkit.pipeline.config.model import RayArgs
from loaderkit.pipeline.execution_plan import ExecutionPlan
from loaderkit.sampling.shard import Shard
from loaderkit.sampling.token_mixture import TokenMixture
from loaderkit.sources.base import Source
from loaderkit.sources.iterable import IterableSource, Pass
from loaderkit.sources.mixture import MixtureSource
from loaderkit.stages.base import FieldSpec, SampleChunk
from loaderkit.stages.image.formats import set_pillow_limits

logger = logging.getLogger("loaderkit")


def make_executor(plan: ExecutionPlan, clock: Clock = time.perf_counter) -> Executor:
    """An executor that is not started. Raises ConfigError."""
    if plan.is_shared:
        return _make_shared_executor(plan, clock)
    if isinstance(plan.source, IterableSource):
        num_processes = plan.config.prefetch.first_processes if plan.is_remote else 1
        plan.source.check_readers(plan.schedule.world_size, num_processes)
    if plan.is_remote:
        # Late: it imports this module, and takes a tenth of the time to the first batch.
        from loaderkit.pipeline.process_setup import make_remote_engine

        return make_remote_engine(plan)
    if plan.executor == "inline":
        compiled = plan.compiled
        return InlineEngine(
            make_batch_plan(plan), compiled.stages, compiled.pools, clock=clock, counters=compiled.counters
        )
    return make_thread_engine(plan, clock)


def _make_shared_executor(plan: ExecutionPlan, clock: Clock) -> Executor:
    """An executor of which one rank has the workers."""
    # Late: only these need the connections of ranks.
    from loaderkit.pipeline.ranks.share_stages import ShareStages
    from loaderkit.pipeline.ranks.shared_executor import SharedExecutor
    from loaderkit.ranks.channel import PeerChannel

    prefetch, place, later = plan.config.prefetch, plan.place, plan.trainer_stages
    raises = prefetch.on_timeout == "raise"

    def about() -> dict[str, str]:
        return {"seed": str(plan.config.order.seed), "the batch": repr(plan.config.batch), **plan.fingerprint()}

    return SharedExecutor(
        None if place.number else make_executor(plan.for_reader, clock),
        PeerChannel(place.peers, place.number, plan.config.name, timeout_s=prefetch.timeout, raises=raises),
        ShareStages(_name_of_sharing(plan), later, clock),
        schedule=plan.schedule,
        num_epochs=plan.config.order.epochs,
        about=about,
        memory_bytes=prefetch.memory,
        timeout_s=prefetch.timeout,
        raises=raises,
        pinned_for=plan.compiled.device,
        clock=clock,
    )


def _name_of_sharing(plan: ExecutionPlan) -> str:
    """The name, among the stages, of passing batches on."""
    taken = {stage.name for stage in plan.config.all_stages}
    names = chain(("share",), (f"share-{number}" for number in count(2)))
    return next(name for name in names if name not in taken)


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


def make_batch_plan(plan: ExecutionPlan, allocator: Allocator | None = None) -> BatchPlan:
    """The batches of a plan; `allocator` gives shared memory."""
    config, compiled, shard, schedule = plan.config, plan.compiled, plan.shard, plan.schedule
    batch, early, batching = config.batch, compiled.context.early_stream, plan.batching
    most_samples = mean_samples = schedule.batch_size
    if batching is not None:
        most_samples, mean_samples = batching.most_samples, batching.mean_samples
    shape = BatchShape(
        most_samples,
        batch.pad_value,
        config.errors.on_bad_sample,
        has_keys=_names_samples(plan),
        marks_wrapped=schedule.world_size > 1 and not schedule.drop_last,
        filters=config.filters,
        skips_empty=config.skips_empty_batches,
    )
    # A mixture's `read` is several stages; those behind the ones that run here act on batches.
    runs = compiled.context.sample_runs
    look = Look([(stage.name, run) for stage, run in zip(compiled.stages, runs, strict=False)])
    packing = plan.packing
    make_chunk: MakeChunk = SampleChunk
    make_single: MakeChunk = SampleChunk
    if packing is not None:
        make_chunk, make_single = partial(packed_chunk, packing), partial(document_chunk, packing)
    return BatchPlan(
        BatchCursor(
            plan.order(),
            schedule,
            num_epochs=config.order.epochs,
            shard=shard,
            on_seek=compiled.on_seek,
            batching=batching,
        ),
        BatchMemory(
            most_samples,
            shard.num_batches(config.prefetch.first_batches),
            shard.num_bytes(config.prefetch.memory),
            shard=shard,
            pinned_for=plan.pinned_for or compiled.device,
            allocator=allocator,
            mean_samples=mean_samples,
            num_tokens=None if batching is None else batch.tokens,
        ),
        BatchAssembler(
            plan.source,
            shape,
            None if early is None else early.run,
            packing=packing,
            lengths_of=plan.mixture.lengths_of if isinstance(plan.mixture, TokenMixture) else None,
        ),
        key=plan.source.key,
        find_specs=_find_specs(plan, make_single, look),
        preparing=look.place,
        make_chunk=make_chunk,
        make_single=make_single,
        sources_of=plan.source.numbers_of if isinstance(plan.source, MixtureSource) and packing is None else None,
        batch_size=mean_samples,
        whole_chunks=compiled.lowering is not None,
        begin_pass=partial(Pass, plan.source, schedule=schedule, shard=shard)
        if isinstance(plan.source, IterableSource)
        else None,
    )


def _find_specs(
    plan: ExecutionPlan, make_single: MakeChunk, run: Look
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


def describe_tuning(plan: ExecutionPlan, clock: Clock = time.perf_counter) -> Tuning:
    """The settings with which a plan starts. Raises ConfigError if it cannot run with them."""
    if plan.is_shared:
        return _describe_shared(plan, clock)
    prefetch, compiled = plan.config.prefetch, plan.compiled
    if prefetch.max_processes is not None and prefetch.processes != "auto":
        logger.warning(
            "prefetch.max_processes: %d is of no effect with prefetch.processes: %d; it bounds processes: auto",
            prefetch.max_processes,
            prefetch.processes,
        )
    if plan.is_remote:
        from loaderkit.pipeline.process_setup import check_processes, pools_of_processes  # late, as above

        check_processes(plan, clock)
        pools = pools_of_processes(plan)
    else:
        if prefetch.processes != 1 and prefetch.executor != "auto":
            logger.warning(
                "prefetch.processes: %s is of no effect with prefetch.executor: %s; executor: process and ray have several",
                prefetch.processes,
                prefetch.executor,
            )
        if prefetch.ray != RayArgs():
            logger.warning("prefetch.ray is of no effect with prefetch.executor: %s", prefetch.executor)
        pools = compiled.described_pools(1)
    cropping, whole = compiled.cropping, not native.HAS_JPEG
    return Tuning(
        executor=plan.executor,
        batches=prefetch.first_batches,
        executor_reason=plan.inline_reason or plan.moved_reason,
        executor_with_workers=plan.config.executor_with_workers,
        graph=() if compiled.lowering is None else tuple(compiled.lowering.graph.lines()),
        jpeg=None if cropping is None else "whole" if whole else f"crop of {cropping}",
        processes=prefetch.first_processes if plan.is_remote else None,
        cpus=int(prefetch.first_processes * prefetch.ray.num_cpus) or 1 if plan.executor == "ray" else num_cpus(),
        pools=pools,
    )


def _describe_shared(plan: ExecutionPlan, clock: Clock) -> Tuning:
    """The settings of a rank that reads for others, or for which another reads; the latter has no workers."""
    peers, number = plan.place.peers, plan.place.number
    tuning = Tuning(executor=plan.executor, batches=plan.config.prefetch.first_batches, cpus=num_cpus())
    if not number:
        tuning = describe_tuning(plan.for_reader, clock)
    names = (_name_of_sharing(plan), *(stage.name for stage in plan.trainer_stages))
    others = (*peers[:number], *peers[number + 1 :])
    pools = (*tuning.pools, PoolTuning(names, 1, is_trainers=True))
    return replace(tuning, pools=pools, reader=peers[0], peers=others)
