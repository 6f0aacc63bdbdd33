"""Verdicts on pipelines drawn at random: python -m profiles.drawn [--number 400] [--seed N] [--machine M] [--suggest]

Each has one bottleneck of some kind, built into some stage, of a strength drawn at random, with some workers, batches ahead,
executor. It runs under `loader.profile()`; of the report is asked: is the stage right, is the kind right, does it contradict
itself (`bottlenecks.contradictions`). With --suggest the settings that it suggests are tried, interleaved with the pipeline as
it is. The machine is quiet, busy (with another program), busier (with two), or quota (half a CPU by cgroups; as root).
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loaderkit import Loader, Pipeline
from loaderkit.connectors.base import Connector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.profile.experiments.interleave import Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step, endless, sleep_step
from loaderkit.profile.report import Report
from profiles.bottlenecks import BATCH, Link, contradictions, photographs, small_photographs, text_contradictions
from profiles.record import record

_NUM_WARM, _NUM_BATCHES, _LEAST_S = 12, 40, 0.6
_MOST_CPUS = 0.6  # of all
_MATRIX = np.random.default_rng(0).standard_normal((240, 240)).astype(np.float32)


# ------------------------------------------------------------------------------- functions, for any process


def compute(sample: dict[str, Any], size: int) -> None:
    """Sorting, without the GIL."""
    sample["label"] = int(np.sort(np.random.default_rng(1).random(size, np.float32))[0] > 2)


def in_python(sample: dict[str, Any], turns: int) -> None:
    """Holds the GIL."""
    value = 1
    for _ in range(turns):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
    sample["label"] = value


def multiply(sample: dict[str, Any], times: int) -> None:
    """Matrices, which BLAS multiplies in threads of its own."""
    product = _MATRIX
    for _ in range(times):
        product = product @ _MATRIX
        product = product / np.abs(product).max()
    sample["label"] = int(product[0, 0] > 2)


def wait(sample: dict[str, Any], seconds: float) -> None:
    """As a request to a server."""
    time.sleep(seconds)
    sample["label"] = 0


_lock = threading.Lock()


def wait_for_others(sample: dict[str, Any], seconds: float) -> None:
    """Holds a lock that all share."""
    with _lock:
        time.sleep(seconds)
    sample["label"] = 0


def number_of(sample: dict[str, Any]) -> int:
    return int(str(sample["__key__"]).rsplit("/", 1)[-1].split(".")[0])


def straggle(sample: dict[str, Any], usual: float, slow: float) -> None:
    """One in fifty takes long."""
    time.sleep(slow if number_of(sample) % 50 == 7 else usual)
    sample["label"] = 0


def burst(sample: dict[str, Any], usual: float, slow: float) -> None:
    """Twelve in a row of a hundred take long."""
    time.sleep(slow if number_of(sample) % 100 < 12 else usual)
    sample["label"] = 0


_is_begun = threading.Event()


def begin_slowly(sample: dict[str, Any], seconds: float) -> None:
    """As a function that loads a model when it is first called."""
    with _lock:
        if not _is_begun.is_set():
            time.sleep(seconds)
            _is_begun.set()
    sample["label"] = 0


def light(sample: dict[str, Any]) -> None:
    sample["label"] = 0


class Store(MemoryConnector):
    """Objects in memory; a read of object n takes `delays[n % len(delays)]`, then the link, if there is one."""

    def __init__(self, objects: Mapping[str, bytes], delays: list[float], link: Link | None = None) -> None:
        super().__init__(objects)
        self._delays = delays
        self._link = link

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        if delay_s := self._delays[int(key.partition(".")[0]) % len(self._delays)]:
            time.sleep(delay_s)
        if self._link is not None:
            self._link.carry(len(buffer))


# ------------------------------------------------------------------------------------------------- the pipelines


@dataclass(frozen=True)
class Drawn:
    """A pipeline: what limits it, where, how, and what is right to say of it."""

    bottleneck: str
    stage: str | None
    kinds: frozenset[str]
    call: str
    args: Mapping[str, Any]
    store: Callable[[], Connector]
    overrides: Mapping[str, Any]
    step: Step
    is_from_start: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        sizes = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in self.overrides.items())
        return f"{self.bottleneck} in {self.stage}: {self.note}, {sizes}"


def draw(rng: random.Random) -> Drawn:
    """A pipeline with one bottleneck."""
    executor = rng.choice(["thread", "thread", "thread", "process"])
    workers = rng.choice([1, 2, 3, 4, 6])
    batches = rng.choice([1, 2, 4, None])
    overrides: dict[str, Any] = {"prefetch.executor": executor, "prefetch.concurrency": workers}
    if batches is not None:
        overrides["prefetch.batches"] = batches
    size = rng.choice([4, 8, 16])
    overrides["stages.batch.size"] = size
    makers: list[Callable[..., Drawn]] = [
        _computing, _decoding, _gil, _blas, _latency, _waiting_call, _lock_in_call, _stragglers, _bursts, _training,
        _python_consumer, _start,
    ]  # fmt: skip
    if executor == "thread":
        makers += [_bandwidth, _memory, _stragglers_in_read, _bursts_in_read]
    return rng.choice(makers)(rng, overrides, workers, size)


def _drawn(
    bottleneck: str,
    stage: str | None,
    kinds: str,
    overrides: dict[str, Any],
    note: str,
    *,
    call: str = "light",
    store: Callable[[], Connector] = small_photographs,
    step: Step | None = None,
    is_from_start: bool = False,
    **args: Any,
) -> Drawn:
    return Drawn(
        bottleneck,
        stage,
        frozenset(kinds.split()),
        call,
        args,
        store,
        overrides,
        step or sleep_step(0.0),
        is_from_start,
        note,
    )


def _computing(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    number = round(10 ** rng.uniform(4.8, 5.7))
    return _drawn("CPU", "call", "computing", overrides, f"sorting {number}", call="compute", size=number)


def _decoding(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    pixels = 8 * rng.randrange(50, 112)
    return _drawn(
        "CPU", "decode", "computing", overrides, f"{pixels} pixels", store=lambda: Store(photographs(pixels), [0.0])
    )


def _gil(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    turns = round(10 ** rng.uniform(4.4, 5.0))
    kinds = "gil" if workers > 1 else "gil computing"
    return _drawn("GIL", "call", kinds, overrides, f"{turns} turns", call="in_python", turns=turns)


def _blas(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    times = rng.randrange(2, 9)
    return _drawn("BLAS pool", "call", "oversubscription", overrides, f"{times} products", call="multiply", times=times)


def _latency(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    seconds = 10 ** rng.uniform(-2.6, -1.7)
    if overrides["prefetch.executor"] == "process":
        return _waiting_call(rng, overrides, workers, size)
    kinds = "latency waiting" + _if_shallow(overrides, workers, size)
    return _drawn(
        "latency", "read", kinds, overrides, f"{1e3 * seconds:.1f} ms", store=lambda: Store(photographs(64), [seconds])
    )


def _waiting_call(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    seconds = 10 ** rng.uniform(-2.6, -1.7)
    kinds = "latency waiting" + _if_shallow(overrides, workers, size)
    return _drawn("latency", "call", kinds, overrides, f"{1e3 * seconds:.1f} ms", call="wait", seconds=seconds)


def _lock_in_call(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    seconds = 10 ** rng.uniform(-2.8, -2.2)
    kinds = "lock" if workers > 1 else "latency waiting lock"
    return _drawn("lock", "call", kinds, overrides, f"{1e3 * seconds:.1f} ms", call="wait_for_others", seconds=seconds)


def _bandwidth(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    speed = 10 ** rng.uniform(5.8, 6.3)
    kinds = "bandwidth" if workers > 1 else "bandwidth latency waiting"
    return _drawn(
        "bandwidth",
        "read",
        kinds,
        overrides,
        f"{speed / 1e6:.2f} MB/s",
        store=lambda: Store(photographs(64), [0.0], Link(speed)),
    )


def _if_shallow(overrides: Mapping[str, Any], workers: int, size: int) -> str:
    """Few samples are ahead, as seen from the workers: that they have nothing to do is as right an answer."""
    ahead = overrides.get("prefetch.batches", 4) * size
    return " depth" if ahead < 4 * workers else ""


def _uneven(rng: random.Random) -> tuple[float, float]:
    return 10 ** rng.uniform(-3.3, -2.7), 10 ** rng.uniform(-1.0, -0.5)


def _stragglers(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    usual, slow = _uneven(rng)
    note = f"{1e3 * usual:.1f} or {1e3 * slow:.0f} ms"
    return _drawn("stragglers", "call", "stragglers depth", overrides, note, call="straggle", usual=usual, slow=slow)


def _stragglers_in_read(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    usual, slow = _uneven(rng)
    delays = [slow if n == 7 else usual for n in range(50)]
    note = f"{1e3 * usual:.1f} or {1e3 * slow:.0f} ms"
    return _drawn(
        "stragglers", "read", "stragglers depth", overrides, note, store=lambda: Store(photographs(64), delays)
    )


def _bursts(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    usual, slow = 10 ** rng.uniform(-3.3, -2.9), 10 ** rng.uniform(-2.0, -1.6)
    note = f"{1e3 * usual:.1f} or {1e3 * slow:.0f} ms"
    return _drawn("bursts", "call", "stragglers depth", overrides, note, call="burst", usual=usual, slow=slow)


def _bursts_in_read(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    usual, slow = 10 ** rng.uniform(-3.3, -2.9), 10 ** rng.uniform(-2.0, -1.6)
    delays = [slow if n < 12 else usual for n in range(100)]
    note = f"{1e3 * usual:.1f} or {1e3 * slow:.0f} ms"
    return _drawn("bursts", "read", "stragglers depth", overrides, note, store=lambda: Store(photographs(64), delays))


def _memory(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    seconds = 10 ** rng.uniform(-2.4, -1.9)
    more = {
        "stages.batch.size": 1,
        "prefetch.memory": "20KiB",
        "prefetch.concurrency": max(2, workers),
        "prefetch.batches": 4,
    }
    return _drawn(
        "memory", "read", "memory", {**overrides, **more}, f"{1e3 * seconds:.1f} ms",
        store=lambda: Store(photographs(64), [seconds]),
    )  # fmt: skip


def _training(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    seconds = rng.uniform(0.03, 0.06)
    more = {"prefetch.batches": max(2, overrides.get("prefetch.batches", 4))}
    return _drawn(
        "slow loop", None, "training", {**overrides, **more}, f"{1e3 * seconds:.0f} ms", step=sleep_step(seconds)
    )


def _python_consumer(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    turns = rng.randrange(200_000, 600_000)
    more = {"prefetch.batches": max(2, overrides.get("prefetch.batches", 4))}
    return _drawn(
        "busy Python loop",
        None,
        "training",
        {**overrides, **more},
        f"{turns} turns",
        step=lambda batch: in_python({}, turns),
    )


def _start(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    seconds = rng.uniform(0.8, 2.0)
    return _drawn(
        "start-up", "start", "start", overrides, f"{seconds:.1f} s", call="begin_slowly", step=sleep_step(0.02),
        is_from_start=True, seconds=seconds,
    )  # fmt: skip


def build(case: Drawn, folder: Path, more: Mapping[str, Any] | None = None) -> Loader:
    """Its loader. Processes read the photographs as files, threads from the case's own store."""
    overrides = {**case.overrides, **(more or {})}
    is_process = overrides["prefetch.executor"] == "process"
    objects = case.store()
    url, given = "memory://photographs", {"memory": objects}
    if is_process:
        url, given = str(folder_of(objects, folder)), {}
    pipeline = Pipeline.files(url, include="*.jpg").shuffle("none").read().decode().center_crop(64)
    pipeline = pipeline.call(f"profiles.drawn:{case.call}", args=dict(case.args)).batch(BATCH).transfer("cpu")
    return Loader(compile_pipeline(to_config(pipeline, overrides), rank=0, world_size=1, connectors=given))


def folder_of(objects: Connector, folder: Path) -> Path:
    """The objects as files; written once for each size."""
    first = objects.stat("0000.jpg").size
    target = folder / str(first)
    if not target.exists():
        target.mkdir()
        for info in objects.list(""):
            data = bytearray(info.size)
            objects.read_into(info.key, 0, memoryview(data))
            (target / info.key).write_bytes(data)
    return target


# -------------------------------------------------------------------------------------------------- what they say


def profiled(case: Drawn, folder: Path) -> Report:
    """The report on a part of the run: from its beginning, or after a warm-up."""
    _is_begun.clear()
    with build(case, folder) as loader:
        batches = endless(loader)
        if case.is_from_start:
            with loader.profile() as profile:
                _loop(batches, case.step)
            return profile.result
        for _ in range(max(_NUM_WARM, 2 * 100 // case.overrides["stages.batch.size"])):
            case.step(next(batches))
        with loader.profile() as profile:
            _loop(batches, case.step)
        return profile.result


def _loop(batches: Iterator[Any], step: Step) -> None:
    begin_s, number = time.perf_counter(), 0
    while number < _NUM_BATCHES or time.perf_counter() - begin_s < _LEAST_S:
        step(next(batches))
        number += 1
        if number >= 8 and time.perf_counter() - begin_s > 10 * _LEAST_S:
            return


def right(case: Drawn, report: Report) -> tuple[bool, bool]:
    """Whether the stage is right, and the kind. Where other programs have most of the CPUs, these are the limit of what
    computes, whatever it would be without them, and a loop that sleeps does not run the moment it is woken up."""
    verdict = report.verdict
    stages, kinds = {case.stage}, set(case.kinds)
    if (report.host.get("others_cpus") or 0.0) > _MOST_CPUS * report.machine.cpus:
        if case.stage is None:
            stages.add("wakeup")
            kinds.add("wakeup")
        elif "gil" in kinds:
            kinds.add("computing")
    return verdict.stage in stages, verdict.kind in kinds


def judged(case: Drawn, report: Report) -> dict[str, Any]:
    verdict = report.verdict
    stage_is_right, kind_is_right = right(case, report)
    by_stage = {stage: round(seconds, 3) for stage, seconds in report.stall.by_stage.items() if seconds > 0.005}
    return {
        "case": case.name,
        "bottleneck": case.bottleneck,
        "stage": verdict.stage,
        "kind": verdict.kind,
        "stage_is_right": stage_is_right,
        "kind_is_right": kind_is_right,
        "contradictions": contradictions(report.model_dump(mode="json")) + text_contradictions(report),
        "percent": verdict.percent,
        "by_stage": by_stage,
        "others_cpus": report.host.get("others_cpus"),
        "evidence": verdict.evidence,
        "change": verdict.change,
        "settings": {one.key: one.value for one in verdict.settings},
    }


def tried(case: Drawn, settings: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """What the suggested settings bring: the speed's ratio, and the waiting before and after."""
    with ExitStack() as stack:
        old = Variant(stack.enter_context(build(case, folder)), case.step)
        new = Variant(stack.enter_context(build(case, folder, settings)), case.step)
        interleave([old, new], rounds=5, window_s=0.4)
    ratio, half = ratio_of(new, old)
    return {"speedup": ratio, "half": half, "stall_before": old.stall_percent, "stall_after": new.stall_percent}


# ---------------------------------------------------------------------------------------------------- the machine


@contextmanager
def machine(name: str) -> Iterator[None]:
    """Busy programs beside this one, or a quota around it."""
    if name == "quota":
        with quota(0.5):
            yield
        return
    programs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range({"quiet": 0, "busy": 1, "busier": 2}[name])
    ]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def quota(cpus: float) -> Iterator[None]:
    """This process may use so many CPUs (cgroups, version 1; as root)."""
    root = Path("/sys/fs/cgroup/cpu")
    folder = root / f"quota-{os.getpid()}"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000")
    (folder / "cpu.cfs_quota_us").write_text(str(int(1e5 * cpus)))
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--machine", choices=["quiet", "busy", "busier", "quota"], default="quiet")
    parser.add_argument("--only", default="", help="only pipelines whose name contains this")
    parser.add_argument("--suggest", action="store_true", help="try the settings that are suggested")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, machine(options.machine):
        while len(rows) < options.number:
            case = draw(rng)
            if options.only not in case.name:
                continue
            row = judged(case, profiled(case, Path(folder)))
            if options.suggest and row["settings"]:
                row["tried"] = tried(case, row["settings"], Path(folder))
            rows.append(row)
            wrong = [name for name in ("stage", "kind") if not row[f"{name}_is_right"]]
            if wrong or row["contradictions"] or "tried" in row:
                print(f"{' and '.join(wrong) or 'right'}: {row}", flush=True)
    shares = {name: sum(row[name] for row in rows) / len(rows) for name in ("stage_is_right", "kind_is_right")}
    wrong_kinds = collections.Counter(row["bottleneck"] for row in rows if not row["kind_is_right"])
    print(f"{len(rows)} on a {options.machine} machine: {shares}, contradictions in "
          f"{sum(bool(row['contradictions']) for row in rows)}; kinds wrong: {dict(wrong_kinds)}")  # fmt: skip
    record(options.out, f"drawn-{options.machine}", seed=options.seed, **shares, rows=rows)


if __name__ == "__main__":
    main()
