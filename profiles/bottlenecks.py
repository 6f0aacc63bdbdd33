"""Pipelines with one bottleneck each, made through the public seams: connectors, data sets, functions, stages.

What takes time is either a wait, whose length is given (a store, a link, a lock: it is the same on a busy machine), or work,
whose amount is given (pixels to decode, turns of a loop, bytes to copy). Beside the bottleneck every pipeline does the rest
of an ordinary one: it reads small JPEGs, decodes them, calls a function, fills batches.
"""

from __future__ import annotations

import io
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from PIL import Image

from loaderkit import Loader, Pipeline
from loaderkit.connectors.base import Connector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.diagnosis.stats import Stats
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import ExecutionPlan, compile_pipeline
from loaderkit.profile.render.html import to_html
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import Report
from loaderkit.stages.slowed import Slowdown, slowed

NUM_OBJECTS = 400
BATCH = 8
_STRAGGLERS = 50  # one object in so many
_NUM_WARM, _NUM_BATCHES = 10, 32


@dataclass(frozen=True)
class Case:
    """One pipeline: where its bottleneck is, how bad, how many workers run it, and whether they run all else, too."""

    bottleneck: str
    is_strong: bool
    workers: int
    is_fused: bool

    @property
    def name(self) -> str:
        strength = "strong" if self.is_strong else "mild"
        return f"{self.bottleneck}, {strength}, {self.workers} workers, {'fused' if self.is_fused else 'apart'}"

    @property
    def expected(self) -> tuple[str | None, frozenset[str]]:
        """The stage, and the kinds that are right."""
        return BOTTLENECKS[self.bottleneck].expected


# ------------------------------------------------------------------------------------------------- what takes time


class Link:
    """A way that so many bytes a second pass in all, however many use it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def carry(self, num_bytes: int) -> None:
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + num_bytes / self._bytes_per_s
            until = self._free_s
        time.sleep(max(0.0, until - time.perf_counter()))


class Store(MemoryConnector):
    """Objects in memory, behind a link, a delay for every request, or both; one in fifty may take a delay of its own."""

    def __init__(
        self,
        objects: Mapping[str, bytes],
        *,
        link: Link | None = None,
        delay_s: float = 0.0,
        straggler_s: float = 0.0,
    ) -> None:
        super().__init__(objects)
        self._link = link
        self._delay_s = delay_s
        self._stragglers = dict.fromkeys(sorted(objects)[7::_STRAGGLERS] if straggler_s else (), straggler_s)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        delay_s = self._stragglers.get(key, self._delay_s)
        if delay_s:
            time.sleep(delay_s)
        if self._link is not None:
            self._link.carry(len(buffer))


def light(sample: dict[str, Any]) -> None:
    """Next to nothing."""
    sample["label"] = len(sample["__key__"])


def in_python(sample: dict[str, Any], turns: int) -> None:
    """Work that holds Python's lock: a loop of `turns` turns."""
    value = 1
    for _ in range(turns):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    sample["label"] = value


class Locked:
    """A function whose callers share a lock, as they would a connection to a database, and hold it for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()

    def __call__(self, sample: dict[str, Any]) -> None:
        with self._lock:
            time.sleep(self._seconds)
        sample["label"] = 0


class Lengths:
    """Arrays of differing lengths, of `num_bytes` at most, which exist already: only to put them into batches is work."""

    def __init__(self, num_bytes: int) -> None:
        longest = num_bytes // 4
        self._arrays = [torch.zeros(longest - 64 * (n % 16)) for n in range(16)]

    def __len__(self) -> int:
        return NUM_OBJECTS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self._arrays[index % 16], "label": index}


# --------------------------------------------------------------------------------------------------- the pipelines


@dataclass(frozen=True)
class Bottleneck:
    """How to make a pipeline with it. `strength` is (mild, strong), in the unit of its maker."""

    stage: str | None
    kinds: str
    strength: tuple[float, float]
    make: Callable[[float], Parts]

    @property
    def expected(self) -> tuple[str | None, frozenset[str]]:
        return self.stage, frozenset(self.kinds.split())


@dataclass(frozen=True)
class Parts:
    """What a pipeline is made of: see `build`. `tuned` is where `workers` goes when it is not fused."""

    pipeline: Pipeline
    tuned: str
    objects: Callable[[], Connector] | None = None
    overrides: Mapping[str, Any] | None = None
    transfer: Callable[[dict[str, Any]], None] | None = None  # in the place of what `transfer` does
    step_s: float = 0.0  # of the loop, for every batch


@cache
def photographs(size: int) -> dict[str, bytes]:
    """Eight JPEGs of size x size pixels, under many names."""
    data = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        coarse = Image.fromarray(rng.integers(0, 255, (size // 8, size // 8, 3), np.uint8))
        buffer = io.BytesIO()
        coarse.resize((size, size), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        data.append(buffer.getvalue())
    return {f"{number:04}.jpg": data[number % 8] for number in range(NUM_OBJECTS)}


def ordinary(call: Callable[..., Any] = light, args: Mapping[str, Any] | None = None, batch: int = BATCH) -> Pipeline:
    pipeline = Pipeline.files("memory://photographs", include="*.jpg").shuffle("none").read().decode().center_crop(64)
    return pipeline.call(call, args=dict(args or {})).batch(batch).transfer("cpu")


def small_photographs() -> Connector:
    return Store(photographs(64))


def slow_store(bytes_per_s: float) -> Parts:
    return Parts(ordinary(), "read", lambda: Store(photographs(64), link=Link(bytes_per_s)))


def latency(seconds: float) -> Parts:
    return Parts(ordinary(), "read", lambda: Store(photographs(64), delay_s=seconds))


def straggler(seconds: float) -> Parts:
    return Parts(ordinary(), "read", lambda: Store(photographs(64), delay_s=1e-3, straggler_s=seconds))


def decoding(size: float) -> Parts:
    return Parts(ordinary(), "decode", lambda: Store(photographs(int(size))))


_DECLARED = {"stages.call.thread_safe": True}  # else one item at a time is the limit, whatever it does


def python(turns: float) -> Parts:
    return Parts(ordinary(in_python, {"turns": int(turns)}), "call", small_photographs, overrides=_DECLARED)


def locked(seconds: float) -> Parts:
    return Parts(ordinary(Locked(seconds)), "call", small_photographs, overrides=_DECLARED)


def slow_transfer(seconds: float) -> Parts:
    link = Link(1 / seconds)  # one batch at a time
    return Parts(ordinary(), "transfer", small_photographs, transfer=lambda batch: link.carry(1))


def slow_consumer(seconds: float) -> Parts:
    return Parts(ordinary(), "decode", small_photographs, step_s=seconds)


def little_memory(seconds: float) -> Parts:
    """Batches of one sample, of which the budget holds one: then all workers but one stand still."""
    return Parts(
        ordinary(batch=1),
        "read",
        lambda: Store(photographs(64), delay_s=seconds),
        {"prefetch.memory": "20KiB"},
    )


def assembling(num_bytes: float) -> Parts:
    pipeline = Pipeline.dataset(Lengths(int(num_bytes))).shuffle("none").read().call(light)
    return Parts(pipeline.batch(BATCH, ragged={"x": "pad"}).transfer("cpu"), "batch")


BOTTLENECKS: dict[str, Bottleneck] = {
    "slow store": Bottleneck("read", "bandwidth", (2.0e6, 0.7e6), slow_store),
    "high latency": Bottleneck("read", "latency", (2.5e-3, 8e-3), latency),
    "CPU-bound decode": Bottleneck("decode", "computing", (448, 896), decoding),
    "GIL-bound call": Bottleneck("call", "gil", (25_000, 80_000), python),
    "slow transfer": Bottleneck("transfer", "bandwidth waiting", (12e-3, 40e-3), slow_transfer),
    "slow consumer": Bottleneck(None, "training", (10e-3, 30e-3), slow_consumer),
    "shared lock": Bottleneck("call", "lock", (1.5e-3, 4e-3), locked),
    "one straggler in 50": Bottleneck("read", "stragglers", (0.1, 0.3), straggler),
    "little memory": Bottleneck("read", "memory", (4e-3, 12e-3), little_memory),
    "batch assembly": Bottleneck("batch", "computing gil", (1.5e6, 5e6), assembling),
}

CASES = [
    Case(bottleneck, is_strong, workers, is_fused)
    for bottleneck, is_strong, workers, is_fused in product(BOTTLENECKS, (False, True), (2, 4), (True, False))
]

DOZEN = [
    Case("slow store", False, 2, True),
    Case("high latency", True, 4, False),
    Case("high latency", False, 2, True),
    Case("CPU-bound decode", True, 2, True),
    Case("GIL-bound call", False, 2, False),
    Case("slow transfer", False, 4, False),
    Case("slow consumer", False, 4, True),
    Case("slow consumer", True, 2, False),
    Case("shared lock", True, 4, True),
    Case("one straggler in 50", False, 2, False),
    Case("little memory", True, 4, True),
    Case("batch assembly", False, 2, False),
]


def build(case: Case, more: Mapping[str, Any] | None = None, slowdown: Slowdown | None = None) -> tuple[Loader, float]:
    """The loader of a case, with more overrides, and how long the loop takes for a batch, in s."""
    bottleneck = BOTTLENECKS[case.bottleneck]
    parts = bottleneck.make(bottleneck.strength[case.is_strong])
    overrides: dict[str, Any] = {"prefetch.concurrency": case.workers, **(parts.overrides or {})}
    if not case.is_fused:
        overrides |= {f"stages.{parts.tuned}.workers": case.workers, "prefetch.concurrency": case.workers + 2}
    overrides |= more or {}
    given = {} if parts.objects is None else {"memory": parts.objects()}
    config = to_config(parts.pipeline, overrides)
    plan = compile_pipeline(config, rank=0, world_size=1, connectors=given, slowdown=slowdown)
    if parts.transfer is not None:
        _replace_transfer(plan, parts.transfer)
    return Loader(plan), parts.step_s


def _replace_transfer(plan: ExecutionPlan, run: Any) -> None:
    """Let the stage `transfer` do what a slow link would."""
    for number, stage in enumerate(plan.compiled.stages):
        if stage.kind == "transfer":
            slow = replace(stage, run=lambda batch, context: run(batch))
            plan.compiled.stages[number] = slowed(slow, plan.slowdown)


def measure(case: Case) -> dict[str, Any]:
    """Run a case: what `stats().to_dict()` says of it, and how many CPUs other programs used meanwhile, `others_cpus`: where
    those are short, the bottleneck that was built in may not be the real one."""
    stats, others_cpus = run(case)
    return {**stats.to_dict(), "others_cpus": round(others_cpus, 2)}


def run(case: Case, begun: Callable[[], None] | None = None) -> tuple[Stats, float]:
    """Run a case, but for its beginning: its accounts, and how many CPUs other programs used meanwhile. `begun` is called
    once it works."""
    size_factor = BATCH // 2 if case.bottleneck == "little memory" else 1
    loader, step_s = build(case)
    with loader:
        batches = (batch for _ in range(100) for batch in loader)
        for number in range(_NUM_WARM * size_factor):
            next(batches)
            if begun is not None and number == 0:
                begun()
        warm, cpu = loader.stats(), cpu_seconds()
        for _ in range(_NUM_BATCHES * size_factor // (4 if step_s else 1)):
            next(batches)
            if step_s:
                time.sleep(step_s)
        found = loader.stats(since=warm)
        all_s, own_s = (now - then for now, then in zip(cpu_seconds(), cpu, strict=True))
        batches.close()
    return found, max(0.0, all_s - own_s) / found.wall_s


def cpu_seconds() -> tuple[float, float]:
    """CPU time of the machine so far, but for what was idle, and of this process."""
    with open("/proc/stat") as file:
        ticks = [int(number) for number in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), time.process_time()


def is_right(case: Case, found: Mapping[str, Any]) -> bool:
    """Whether a verdict names the bottleneck that was built in, and how it limits, perhaps as one of two that it cannot tell
    apart."""
    stage, kinds = case.expected
    return found["stage"] == stage and bool({found["kind"], found["or_kind"]} & kinds)


def contradictions(found: Mapping[str, Any]) -> list[str]:
    """What a report, or `stats().to_dict()`, says of itself that does not agree: the verdict against the table of waits, the
    evidence against both, sums against their parts."""
    stall, verdict, wall_s = found["stall"], found["verdict"], found["wall_s"]
    by_stage: Mapping[str, float] = stall["by_stage"]
    problems = []
    if not math.isclose(sum(by_stage.values()), stall["total_s"], rel_tol=1e-6, abs_tol=1e-9):
        problems.append(f"{by_stage} do not sum to {stall['total_s']}")
    if verdict["kind"] == "unknown":
        return problems
    stage, percent = verdict["stage"], verdict["percent"]
    if stage is None:
        if stall["percent"] > 5.0 or abs(100 - stall["percent"] - percent) > 0.11:
            problems.append(f"training is the limit, {percent} %, but the loop waited {stall['percent']} %")
    elif by_stage.get(stage, 0.0) < max(by_stage.values()):
        problems.append(f"{stage} is blamed, and {by_stage} were waited for")
    elif abs(percent - min(100.0, 100 * by_stage[stage] / wall_s)) > 0.06:
        problems.append(f"{percent} % for {stage}, but {by_stage[stage]} of {wall_s} s")
    said = re.match(r"the loop waited ([\d.]+) % of [^,;:]+(?:, ([\d.]+) % for ([^;:,]+))?", verdict["evidence"])
    if said is None:
        problems.append(f"the evidence does not say how long the loop waited: {verdict['evidence']}")
    elif abs(float(said[1]) - stall["percent"]) > 0.06:
        problems.append(f"evidence: {said[0]!r}, but the loop waited {stall['percent']} %")
    elif said[2] is not None and (said[3] != stage or abs(float(said[2]) - percent) > 0.06):
        problems.append(f"evidence: {said[0]!r}, but {percent} % for {stage}")
    later = re.search(_AFTER_START, verdict["evidence"])
    if later is not None:
        causes = {cause: seconds for cause, seconds in by_stage.items() if cause != "start"}
        expected = [(later[1], sum(causes.values())), (later[3] or later[1], causes[later[2]])]
        wrong = [said for said, seconds in expected if abs(float(said) - min(100.0, 100 * seconds / wall_s)) > 0.06]
        if wrong or causes[later[2]] < max(causes.values()):
            problems.append(f"evidence: {later[0]!r}, but {by_stage} of {wall_s} s")
    others, used = (re.search(rf"{words} ([\d.]+)(?: CPUs)? of ([\d.]+)", verdict["evidence"]) for words in _CPUS)
    others_cpus = found.get("host", {}).get("others_cpus")
    if others is not None and others_cpus is not None and abs(float(others[1]) - others_cpus) > 0.051:
        problems.append(f"evidence: {others[0]!r}, but {others_cpus}")
    if used is not None and float(used[1]) > float(used[2]):
        problems.append(f"evidence: {used[0]!r}")
    return problems + settings_contradictions(verdict, found.get("tuning", {}))


def settings_contradictions(verdict: Mapping[str, Any], tuning: Mapping[str, Any]) -> list[str]:
    """What a verdict's words and its settings say that does not agree: a setting that is not named, another number for it, or
    workers that are said not to help. `tuning`: the settings as they are, as a report has them."""
    change, problems = verdict["change"], []
    settings = {one["key"]: one["value"] for one in verdict.get("settings", ())}
    parts = change.split("; and for ")  # of several causes
    for key, value in settings.items():
        of_workers = key == "prefetch.concurrency" or key.endswith(".workers")
        stage = key.removeprefix("stages.").removesuffix(".workers")
        in_pool = next((pool["stages"] for pool in tuning.get("pools", ()) if stage in pool["stages"]), [stage])
        own, resized = parts[0], None
        for part in parts:
            found = re.search(r'loader\.resize\("([^"]+)", workers=(\d+)\)', part)
            if resized is None and found and (key == "prefetch.concurrency" or found[1] in in_pool):
                own, resized = part, found
        if of_workers and "more workers would not help" in own:
            problems.append(f"{key}: {value}, but {change!r}")
        if of_workers and resized is not None:
            others = [
                pool["workers"]
                for pool in tuning.get("pools", ())
                if resized[1] not in pool["stages"] and "process" not in pool
            ]
            if value != int(resized[2]) + (sum(others) if key == "prefetch.concurrency" else 0):
                problems.append(f"{key}: {value}, but {change!r}")
        elif {*re.findall(rf"{re.escape(key)}: (\w+)", change)} != {str(value)}:
            problems.append(f"{key}: {value}, but {change!r}")
    return problems


_CPUS = ("other programs used", "the workers use")
_PERCENT = r"([\d.]+) %"
_AFTER_START = rf"after the start {_PERCENT}(?:, most of it)? for ([^;:()]+?)(?: \({_PERCENT}\))?(?=[;:]|$)"


def text_contradictions(report: Report) -> list[str]:
    """The same of what a reader sees, as text and as a page: one percentage of waiting, and rows that sum to it."""
    waited, problems = report.stall.percent, []
    head = f"{report.verdict.headline} ({100 * report.verdict.confidence:.0f} % sure)"
    page = re.sub(
        r"\s+", " ", re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", to_html(report), flags=re.DOTALL)
    )
    text = to_text(report, width=1000)
    if text.splitlines()[1] != head:
        problems.append(f"{text.splitlines()[1]}, but {head}")
    for words, where in (("the loop waited", text), ("The loop waited for data", page), ("Waiting for data", page)):
        said = re.search(rf"{words} {_PERCENT}", where)
        if said is None or abs(float(said[1]) - waited) > 0.051:
            problems.append(f"{words}: {said and said[0]}, but the loop waited {waited} %")
    parts = dict(
        re.findall(rf"^(computing|waiting for a batch|handing it over|releasing the batch) .* {_PERCENT}", text, re.M)
    )
    in_page = dict(
        re.findall(rf"(computing|waiting for a batch|handing it over|releasing the batch): [^,]+, {_PERCENT}", page)
    )
    if parts != in_page or (report.num_batches and abs(sum(map(float, parts.values())) - 100) > 0.21):
        problems.append(f"the loop's parts are {parts}, on the page {in_page}")
    if abs(float(parts["waiting for a batch"]) + float(parts["releasing the batch"]) - waited) > 0.16:
        problems.append(f"the loop's parts are {parts}, but the loop waited {waited} %")
    rows = text.partition("What the loop waited for\n")[2].partition("\n\n")[0].splitlines()
    causes = [float(found[1]) for row in rows if (found := re.search(_PERCENT, row))]
    if abs(sum(causes) - waited) > 0.05 * (len(report.stall.by_stage) + 1) + 1e-9:
        problems.append(f"{rows} do not sum to {waited} %")
    if causes != sorted(causes, reverse=True) or (
        report.verdict.stage and not rows[0].startswith(report.verdict.stage)
    ):
        problems.append(f"{report.verdict.stage} is blamed: {rows}")
    return problems
