"""Pipelines for `profiles.drawn`, drawn at random: one bottleneck each, its strength, workers, batches and executor."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loaderkit import Loader, Pipeline
from loaderkit.connectors.base import Connector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.profile.experiments.loops import Step, sleep_step
from profiles.bottlenecks import BATCH, NUM_OBJECTS, Link, photographs, small_photographs

VARIED = frozenset({"stragglers", "bursts"})  # bottlenecks of few slow samples

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


is_begun = threading.Event()


def begin_slowly(sample: dict[str, Any], seconds: float) -> None:
    """As a function that loads a model when it is first called."""
    with _lock:
        if not is_begun.is_set():
            time.sleep(seconds)
            is_begun.set()
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
        makers += [
            _giants,
            _shared_lock,
            _one_batch,
            _free_threads,
            _bandwidth,
            _memory,
            _stragglers_in_read,
            _bursts_in_read,
        ]
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
    found = {*kinds.split()}
    if stage == "call" and not overrides.get("stages.call.thread_safe"):
        found.add("lock")  # one item of such a function at a time is what limits it, whatever it does
    if stage is not None and overrides.get("prefetch.batches") == 1 and overrides["prefetch.concurrency"] > 1:
        found.add("depth")  # workers stand still at the end of each batch
    return Drawn(
        bottleneck,
        stage,
        frozenset(found),
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


def _giants(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    """A few photographs are many times as large as the others."""
    pixels, num = 8 * rng.randrange(200, 500), rng.randrange(6, 13)
    places = rng.sample(range(NUM_OBJECTS), num)

    def store() -> Connector:
        small, large = photographs(64), [*photographs(pixels).values()]
        return Store({**small, **{f"{place:04}.jpg": large[place % 8] for place in places}}, [0.0])

    return _drawn("giants", "decode", "stragglers", overrides, f"{num} of {pixels} pixels", store=store)


def _shared_lock(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    """Of a function that several threads may be in at once, for all that is declared."""
    seconds = 10 ** rng.uniform(-2.8, -2.0)
    more = {**overrides, "prefetch.concurrency": max(2, workers), "stages.call.thread_safe": True}
    note = f"{1e3 * seconds:.1f} ms, thread_safe"
    return _drawn("lock", "call", "lock", more, note, call="wait_for_others", seconds=seconds)


def _one_batch(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    """Nothing is ahead of the batch in work, so that workers stand still at the end of each."""
    number = round(10 ** rng.uniform(4.3, 5.0))
    more = {**overrides, "prefetch.concurrency": 4, "prefetch.batches": 1, "stages.batch.size": 4}
    begin_s = time.perf_counter()
    for _ in range(8):
        compute({}, number)
    # Not as long as a batch takes, however fast the machine sorts: else the loop hardly waits.
    step = sleep_step(rng.uniform(0.0, 1.0) * (time.perf_counter() - begin_s) / 8)
    return _drawn("one batch", "call", "depth", more, f"sorting {number}", call="compute", step=step, size=number)


def _free_threads(rng: random.Random, overrides: dict[str, Any], workers: int, size: int) -> Drawn:
    """Python that is declared to run in several threads."""
    turns = round(10 ** rng.uniform(4.4, 5.0))
    more = {**overrides, "prefetch.concurrency": max(2, workers), "stages.call.thread_safe": True}
    return _drawn("GIL", "call", "gil", more, f"{turns} turns, thread_safe", call="in_python", turns=turns)


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
    config, given = configured(case, folder, more)
    return Loader(compile_pipeline(config, rank=0, world_size=1, connectors=given))


def configured(
    case: Drawn, folder: Path, more: Mapping[str, Any] | None = None
) -> tuple[PipelineConfig, dict[str, Connector]]:
    """Its pipeline, and the connectors that it needs."""
    overrides = {**case.overrides, **(more or {})}
    is_process = overrides["prefetch.executor"] == "process"
    objects = case.store()
    url, given = "memory://photographs", {"memory": objects}
    if is_process:
        url, given = str(folder_of(objects, folder)), {}
    pipeline = Pipeline.files(url, include="*.jpg").shuffle("none").read().decode().center_crop(64)
    pipeline = pipeline.call(f"profiles.drawn_cases:{case.call}", args=dict(case.args)).batch(BATCH).transfer("cpu")
    return to_config(pipeline, overrides), given


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
