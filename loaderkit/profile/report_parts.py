"""The parts of a report. They hold plain values only; None means that something was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, computed_field

from loaderkit.diagnosis.verdict import Cause, Part, Setting, headline


class CausalCheck(Part):
    """A test of the verdict: the stage that it names was slowed down on purpose for a moment."""

    stage: str = Field(description="the stage that was slowed")
    delay_s: float = Field(description="put into it, for every item")
    expected_percent: float = Field(description="how much longer a batch takes if the verdict is right")
    measured_percent: float = Field(description="how much longer it took")
    interval_percent: float = Field(description="half the width of the 95 % interval of that")
    agrees: bool | None = Field(description="null: too noisy to say")
    evidence: str


class Rate(Part):
    """A measured speed."""

    samples_per_s: float
    interval_percent: float = Field(description="half the width of the 95 % interval, from repeated windows")
    seconds: float = Field(description="how long it was measured")
    num_batches: int


TrialOutcome = Literal["faster", "likely faster", "no faster", "slower", "failed", "not tried"]

_NOT_SUGGESTED: Mapping[TrialOutcome, str] = {
    "no faster": "no faster for sure: not suggested",
    "slower": "slower: not suggested",
    "failed": "not suggested",
}


class SettingsTrial(Part):
    """The result of settings that ran in turns with the pipeline as it is, window by window; or why they did not run."""

    settings: list[Setting]
    outcome: TrialOutcome = Field(
        description="faster: settings that are no faster are called that in at most 5 % of all trials; likely faster: in at "
        "most half of them; no faster: neither that nor slower for sure, or not so with a second pair of loaders; failed: the "
        "pipeline did not run with them; not tried"
    )
    before: Rate | None = Field(None, description="the pipeline as it is; null: not tried")
    after: Rate | None = Field(None, description="with the settings")
    speedup: float | None = Field(None, description="the median of neighbouring windows")
    interval: float | None = Field(None, description="half the width of its 95 % interval")
    speedup_again: float | None = Field(
        None,
        description="by a second pair of loaders, where the first showed a small gain; null: there was none, or it gave none",
    )
    stall_after_percent: float = Field(0.0, description="of the time, waiting with the settings")
    num_pairs: int = Field(0, description="of neighbouring windows")
    num_faster: int = Field(0, description="pairs in which the settings were faster")
    is_held_up: bool = Field(
        False,
        description="for sure, more workers brought less than half of what each at its own pace would: they wait for one "
        "another",
    )
    seconds: float = Field(0.0, description="how long the trial took")
    extra_cpus: float | None = Field(None, description="CPUs that the settings used beyond those of before")
    extra_bytes: int | None = Field(None, description="memory for batches that they used beyond that of before")
    note: str = Field("", description="why it was not tried, or how it failed")
    predicted: float | None = Field(None, description="the speed-up by simulation; null: not known")
    predicted_percent: float | None = Field(
        None, description="half the width of the 95 % interval of that, in percent; null: too few steps to tell"
    )

    @property
    def is_suggested(self) -> bool:
        """False of settings that were tried and are not faster."""
        return self.outcome not in _NOT_SUGGESTED

    def __str__(self) -> str:
        """In words."""
        if self.outcome == "not tried":
            return f"not tried: {self.note}{self._predicted()}"
        if self.before is None or self.after is None:
            return f"tried: it did not run ({self.note}): {_NOT_SUGGESTED['failed']}"
        again = "" if self.speedup_again is None else f"; with a second pair of loaders {self.speedup_again:.2f} times"
        found = (
            f"tried: {self.before.samples_per_s:.4g} -> {self.after.samples_per_s:.4g} samples/s, {self.speedup:.2f} times as "
            f"fast (+- {self.interval:.2f}), faster in {self.num_faster} of {self.num_pairs} pairs of windows{again}"
        )
        meaning = _NOT_SUGGESTED.get(self.outcome) or ("" if self.outcome == "faster" else "likely, not for sure")
        return f"{found}: {meaning}" if meaning else found

    def _predicted(self) -> str:
        if self.predicted is None:
            return ""
        error = "" if self.predicted_percent is None else f" (+- {self.predicted_percent:.0f} %)"
        return f"; by simulation {self.predicted:.2f} times as fast{error}"


class VerdictPart(Part):
    """What limits the loop, and the one change to make."""

    stage: str | None = Field(
        description="the stage to blame, or start, memory, wakeup, network, worker restart, release, epoch change; null: "
        "training is the limit"
    )
    kind: str = Field(
        description="training, computing, gil, oversubscription, lock, latency, bandwidth, stragglers, waiting, memory, depth, "
        "start, wakeup, network, restart, quota, failed (an error came before the first batch) or unknown"
    )
    or_kind: str | None = Field(
        None, description="another kind that fits the figures about as well; null: kind fits best"
    )
    percent: float = Field(description="of the time lost to it; for null: of the time not lost to loading")
    confidence: float = Field(description="from 0 to 1")
    evidence: str
    change: str = Field(description="what to do, in words")
    source: str | None = Field(
        None,
        description="begins with the name of the one of several sources that alone holds the loop up, and says how that is "
        "seen; null: none does",
    )
    settings: list[Setting] = Field([], description="the same as values to set; empty where it is nothing to be set")
    causes: list[Cause] = Field(
        [],
        description="all that the loop waited for, the longest first; two with one stage are the two kinds that cannot be told "
        "apart. Those within a third of the first are in the headline, and `settings` are for all of these",
    )
    tried: SettingsTrial | None = Field(
        None,
        description="the trial of the settings, or of more workers where that tells a lock from latency; null: there was "
        "nothing to try",
    )
    check: CausalCheck | None = None

    @computed_field(description="the verdict in one line")  # type: ignore[prop-decorator]
    @property
    def headline(self) -> str:
        return headline(self.stage, self.kind, self.or_kind, self.causes)


class StallPart(Part):
    """What the loop waited for. The causes sum to the whole."""

    total_s: float
    percent: float = Field(description="of wall_s")
    by_stage: dict[str, float] = Field(
        description="seconds by stage, or start (the loader's first batch), memory, wakeup, network, worker restart, "
        "release, epoch change (of a watched loop); the longest first"
    )
    after_start_percent: float | None = Field(
        None, description="the same of the time from the first batch on; null: only one batch, or it came before"
    )


class SlowTime(Part):
    """When a chunk with a slow sample was in a stage."""

    epoch: int
    position: int = Field(description="of the sample in the epoch")
    at_s: float = Field(description="when the chunk was done, by the clock of the accounts")
    chunk: int = Field(description="samples in it")
    chunk_s: float = Field(description="how long they took")


class StageRow(Part):
    """One stage. workers x time = busy + starved + blocked + idle; busy = computing + io + gil + delayed."""

    name: str
    kind: str
    pool: int = Field(description="stages with the same number are run by the same workers")
    workers: int
    num_items: int
    num_bytes: int
    num_failed: int
    busy_s: float
    cpu_s: float = Field(description="of busy, computing")
    io_s: float = Field(description="of busy, waiting for a store, a device or a lock of the user's")
    gil_s: float = Field(
        description="of busy, waiting for the GIL: all waiting, where the contention probe has shown that a stage holds it"
    )
    delayed_s: float = Field(description="of busy, ready to run while no CPU was free")
    starved_s: float = Field(description="no input; of a pool, at its first stage")
    blocked_s: float = Field(description="no room behind it; of a pool, at its last stage")
    idle_s: float = Field(description="workers that were not wanted")
    slot_s: float = Field(description="the sum")
    p50_s: float | None = Field(description="for an item")
    p99_s: float | None
    items_per_s: float
    bytes_per_s: float
    stall_s: float = Field(description="the loop waited for it")
    stall_percent: float = Field(description="of the time")
    queued_mean: float | None = Field(description="chunks waiting for its workers, over time")
    queued_max: int | None
    in_turn: bool = Field(False, description="one worker at a time runs it; waiting for the turn is starved")
    content: str = Field("", description="what it acts on, if not images: media, of decode, are videos and sounds")
    is_limited: bool = Field(False, description="all workers side by side get hardly more of it done than a few would")
    services: list[list[float]] = Field([], description="pairs: how long items took, in s, and how many did")
    chunk: float | None = Field(None, description="samples that its workers take at a time, where it is known")
    slow: list[SlowTime] = Field(
        [], description="those of the 256 slowest that took three times the median or more, in order of time"
    )


class SourceRow(Part):
    """One of several sources. Seconds are summed over workers, in `read` and in the source's own stages; the time in
    common stages is not split by source. Samples that were read ahead count in num_items, num_bytes and the seconds."""

    name: str
    weight: float = Field(description="its share as planned, over the positions of these batches")
    share: float = Field(description="of what the loop got")
    share_of: Literal["samples", "tokens"] = Field(description="what share and weight are of")
    num_samples: int = Field(
        description="that the loop got; with `pack` documents, and one that is cut counts where it begins"
    )
    num_tokens: int | None = Field(description="of those; null: not known")
    samples_per_s: float
    num_items: int = Field(description="samples that were read")
    num_bytes: int = Field(description="of those")
    bytes_per_s: float
    read_s: float
    stages_s: float = Field(description="in its own stages behind `read`")
    cpu_s: float = Field(description="of both, on a CPU")
    delayed_s: float = Field(description="of both, ready to run while no CPU was free")
    waiting_s: float = Field(description="the rest of both: for a store, a device, a lock or the GIL")
    stall_s: float = Field(description="the loop waited for `read` and those stages")
    stall_percent: float = Field(description="of the time")
    num_bad: int = Field(description="bad samples, each counted once an epoch")
    num_dropped: int = Field(description="samples that `filter` left out")
    num_skipped: int = Field(description="samples left out as they were bad")
    num_replaced: int = Field(description="bad samples in whose slots others stand")
    num_passes: float = Field(description="over its samples since epoch 0, of all ranks together; with `pack` about")
    is_used_up: bool = Field(description="no more of its samples come in this epoch")


class NodeRow(Part):
    """A node that worker processes are or were on."""

    name: str
    is_trainers: bool = Field(description="the training loop runs on it, so its batches pass no network")
    num_workers: int = Field(description="worker processes at the end")
    cpus: float | None = Field(description="that it has for workers; null: not known")
    cpu_s: float = Field(description="CPU time of its worker processes")
    cpus_used: float = Field(description="the same by the time")
    num_batches: int = Field(description="that arrived from there")
    num_bytes: int = Field(description="of those")
    network_bytes_per_s: float = Field(description="of them over the network, by the time")
    way_s: float = Field(description="from finished there to arrived at the trainer, summed over batches")
    carrying_s: float = Field(description="the time in which at least one of its batches was on the way")
    carrying_share: float = Field(description="the same as a share of the time")
    latency_s: float | None = Field(description="the least round trip of a small message to it; null: none was timed")
    num_restarts: int = Field(description="of worker processes that had died there")


class SlowItem(Part):
    """One of the slowest samples."""

    stage: str
    seconds: float = Field(description="in that stage")
    usual_s: float | None = Field(description="what a sample takes there, in the median")
    key: str = Field(description="of the sample; of the first, where several were done as one")
    origin: str = Field(description="the object it lies in")
    source: str | None = Field(None, description="the one of several sources that it is of")
    num_together: int = Field(description="samples that were processed as one; which of them was slow is not known")
    epoch: int
    at_s: float = Field(description="when it was done, since the report begins")


class FirstBatch(Part):
    """Where the time until the first batch went. The parts sum to the whole."""

    import_s: float | None = Field(description="until the packages were there; null from within a program")
    list_s: float = Field(description="to open the source and list it")
    index_s: float = Field(description="of archives: to read or build their indexes")
    workers_s: float = Field(description="to start threads or processes, until a chunk could run")
    by_stage: dict[str, float] = Field(description="then: what the loop waited for")
    total_s: float


class StartPart(Part):
    """One part of a start; others may run beside it."""

    name: str
    begin_s: float = Field(description="since the program began")
    end_s: float
    is_critical: bool = Field(description="it lies on the path that the first step waited for")


class Step(Part):
    """One step of the loop: it computed, then waited for the next batch."""

    at_s: float = Field(description="when it began, since the report begins")
    compute_s: float
    stall_s: float = Field(description="inside next()")


class Steps(Part):
    """The loop, cut at its batches. compute + stall + overhead + outside = wall."""

    num_steps: int
    wall_s: float = Field(description="of the whole report, by its own clock")
    compute_s: float = Field(description="between two batches")
    save_waiting_s: float = Field(0.0, description="of compute_s, waiting for the previous save of a checkpoint")
    save_staging_s: float = Field(0.0, description="of compute_s, copying the state that is saved")
    stall_s: float = Field(description="waiting, by the accounts of the engine")
    overhead_s: float = Field(
        description="inside next() and not waiting: starting the workers, handing over, release_s"
    )
    release_s: float = Field(
        0.0, description="of overhead_s, giving back the memory of batches that the loop has dropped"
    )
    outside_s: float = Field(description="before the first batch was asked for, between epochs, after the last one")
    p50_s: float | None = Field(description="of a step: computing and waiting")
    p99_s: float | None
    compute_p50_s: float | None = Field(description="without pauses for saving, as compute_p99_s")
    compute_p99_s: float | None
    stall_p50_s: float | None
    stall_p99_s: float | None
    every: int = Field(1, description="`steps` has each `every`th step")
    steps: list[Step] = Field([], description="at most 2,048")

    def parts(self) -> list[tuple[str, str, float, float]]:
        """(name, kind, seconds, percent) of all that the loop spent its time on. The report's percentages are of that time, and
        what is outside of it has none."""
        saving = [
            ("waiting for the last save", "saving", self.save_waiting_s),
            ("copying what is saved", "saving", self.save_staging_s),
        ]
        parts = [
            ("computing", "compute", self.compute_s - self.save_waiting_s - self.save_staging_s),
            *(part for part in saving if part[2] > 0),
            ("waiting for a batch", "stall", self.stall_s),
            ("handing it over", "overhead", self.overhead_s - self.release_s),
            ("releasing the batch", "release", self.release_s),
        ]
        whole_s = max(self.compute_s + self.stall_s + self.overhead_s, 1e-9)
        return [(name, kind, seconds, max(0.0, 100.0 * seconds / whole_s)) for name, kind, seconds in parts]


class SavedObjectRow(Part):
    """One file of a checkpoint that was saved. Seconds are summed over all threads."""

    rank: int
    object: str
    num_bytes: int
    staging_s: float = Field(description="copying what was not copied before")
    hashing_s: float
    waiting_s: float = Field(description="for another thread's part")
    writing_s: float
    syncing_s: float = Field(description="making durable")


class SaveRow(Part):
    """One save of a checkpoint that ended within the report's time. It ran behind the loop, except for its pauses."""

    step: int
    at_s: float = Field(description="when it was over, since the report begins")
    num_bytes: int = Field(description="of the files of which this rank knows: its own, or at rank 0 all")
    waiting_s: float = Field(description="the loop waited for the save before")
    staging_s: float = Field(description="the loop waited for the copy of the state")
    flush_s: float = Field(description="from then until it was committed")
    commit_s: float | None = Field(description="of flush_s, once all files were written; null: another rank's")
    error: str | None = Field(description="what it met; null: it is committed")
    objects: list[SavedObjectRow] = Field(description="those that took longest, at most 20")


class PassMark(Part):
    """A mark to reach: the least share of the time in which the accelerator has to compute, and whether it was reached."""

    name: str
    at_least_percent: float
    passes: bool


class Utilisation(Part):
    """The share of the time in which training computed."""

    percent: float = Field(
        description="as MLPerf Storage defines it: the mean of the epochs, without the first step of each"
    )
    whole_run_percent: float | None = Field(None, description="the same of all steps")
    marks: list[PassMark]


class Headroom(Part):
    """How far training is from never waiting: the speed of each side alone."""

    consumer: Rate | None = Field(
        description="the training step alone, on batches that are ready; null: not given, or unknown"
    )
    warm: Rate | None = Field(description="the pipeline alone, its data in memory as far as it fits; null: unknown")
    cold: Rate | None = Field(
        description="the pipeline alone, its files out of the page cache and caches empty; null: not measured, or unknown"
    )
    unknown: list[str] = Field([], description="which rates could not be measured well enough, and why")
    cold_note: str = Field("", description="why there is no cold rate, or what could not be emptied")
    fetch_percent: float | None = Field(description="of the time of the cold pipeline, spent on fetching")
    preprocess_percent: float | None = Field(description="the rest of it")
    factor: float | None = Field(description="pipeline / consumer: below 1 training waits, whatever is read ahead")
    summary: str


class Measured(Part):
    """What a change brought when it was tried."""

    samples_per_s: float
    speedup: float | None = Field(None, description="over the pipeline as it is, measured in interleaved windows")
    stall_percent: float
    interval_percent: float = Field(description="half the width of the 95 % interval, of that")
    error_percent: float = Field(description="of the predicted speed-up, in shares of the measured one")


class WhatIf(Part):
    """A change, and what the model says it would bring."""

    name: str
    settings: list[Setting] = Field(description="what to set; empty where it is not a setting (a faster disk)")
    samples_per_s: float
    stall_percent: float
    speedup: float = Field(description="over what the model says of the pipeline as it is")
    interval_percent: float | None = Field(
        None,
        description="half the width of its 95 % interval, of that: how the speed of the run varied, and what the model was off "
        "for the pipeline as it is; null: too few steps to tell",
    )
    limit: str = Field(description="what the limit would be then: a stage, cpus, gil, or training")
    note: str = ""
    can_run: bool = Field(description="whether --verify can try it here")
    is_advised: bool = Field(False, description="it is what the verdict says to change")
    measured: Measured | None = None


Outcome = Literal["better", "worse", "changed", "noise", "unknown"]


class ComparedFigure(Part):
    """A figure of two runs."""

    name: str
    unit: Literal["per_s", "percent", "seconds"]
    before: float | None
    after: float | None
    change: float | None = Field(description="of per_s and seconds: in percent of before; of percent: in points")
    low: float | None = Field(description="of the 95 % interval of the change; null: one value each, no interval")
    high: float | None
    outcome: Outcome = Field(description="noise: within it; unknown: one value each, and no interval")


class Comparison(Part):
    """A report compared with an earlier one."""

    made_at: str = Field(description="the earlier report, or the last of several")
    num_runs: int = Field(description="how many earlier reports there are; figures before are their means")
    summary: str
    rows: list[ComparedFigure]
    differences: list[str] = Field(description="what else was different: settings, the machine, the limit")
    method: str


class Machine(Part):
    """The machine on which it was measured."""

    cpus: int = Field(description="that this process may use, quota included")
    platform: str
    python: str
    torch: str
    loaderkit: str
    device: str = Field(description="cpu, or the name of the GPU that batches go to, or the loop uses")


class ObjectRow(Part):
    """One object of the checkpoint. Seconds are summed over all threads."""

    object: str
    num_bytes: int
    num_reads: int
    read_s: float
    first_byte_s: float | None = Field(description="of read_s, until the first bytes came; null: the store cannot tell")
    body_s: float | None = Field(
        description="and from then on; several parts may come at once, and then it is more than read_s"
    )
    verify_s: float = Field(description="comparing checksums, by the threads that read")
    copy_s: float = Field(description="from staging memory, as it is")
    cast_s: float = Field(description="to another type, to strides, out of an archive, or to a GPU")
    bytes_per_s: float = Field(description="of one thread while it reads")


class StageTime(Part):
    """One stage of the engine. Seconds of all its workers together."""

    name: str
    workers: int
    busy_s: float
    cpu_s: float = Field(description="of busy, on a CPU")
    starved_s: float = Field(description="no range was left, or there was no memory for one")
    num_bytes: int
