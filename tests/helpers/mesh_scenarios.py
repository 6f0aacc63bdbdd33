"""Loops over shared batches of four ranks, one after another in the same processes: each returns what it saw as JSON values."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_programs import BROADCAST, Store, digest, files, mesh_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import loaderkit
from loaderkit import Loader, Pipeline
from loaderkit.errors import ClosedError, LoaderkitError
from loaderkit.ranks.store import default_store

SHAPE = (2, 1, 2)
Scenario = Callable[[Callable[..., Loader], int, Path], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def run_all(rank: int, num_ranks: int, folder: Path, names: list[str]) -> None:
    """Write down what each scenario returns, or the error that ends it."""
    mesh = mesh_of(rank, num_ranks, folder, SHAPE)
    for name in names:
        result: Any
        try:
            result = SCENARIOS[name](lambda *args, **more: built(mesh, *args, **more), rank, folder)
        except Exception as error:
            result = said(error)
        (folder / f"{name}-{rank}").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


def built(mesh: DeviceMesh, pipeline: Pipeline, store: Store | None = None, **overrides: Any) -> Loader:
    overrides = BROADCAST | {name.replace("__", "."): value for name, value in overrides.items()}
    connectors = {"store": store or Store()}
    return loaderkit.build(pipeline, mesh=mesh, data_dims="dp", overrides=overrides, connectors=connectors)


def said(error: BaseException) -> list[Any]:
    return [type(error).__name__, str(error), list(getattr(error, "ranks", ())), getattr(error, "__notes__", [])]


def told(folder: Path, name: str) -> list[Any]:
    """What each of the four ranks wrote down."""
    return [json.loads((folder / f"{name}-{rank}").read_text()) for rank in range(4)]


def caught(act: Callable[[], Any]) -> list[Any]:
    """The error that `act` ends with."""
    try:
        act()
    except (LoaderkitError, RuntimeError, StopIteration) as error:
        return said(error)
    return []


# ---------------------------------------------------------------------------------------------------- order and state


def walk(loader: Loader) -> list[Any]:
    """Batches with breaks, jumps and a return to an earlier state."""
    seen, states = [], []
    for number, batch in enumerate(loader):
        seen.append(digest(batch))
        states.append(loader.state_dict())
        if number == 6:
            break
    seen += [digest(batch) for batch, _ in zip(loader, range(3), strict=False)]
    loader.load_state_dict(states[4])
    iterator = iter(loader)
    seen += [digest(next(iterator)) for _ in range(2)]
    loader.set_epoch(1)
    seen += [digest(batch) for batch in loader]
    return [seen, len(loader), loader.state_dict()]


@scenario
def threads(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    with build(files()) as loader:
        return walk(loader)


@scenario
def processes(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    with build(files(), prefetch__executor="process", prefetch__processes=2) as loader:
        return walk(loader)


@scenario
def profiles(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    """The report on each rank, and what the trace has."""
    with build(files()) as loader:
        with loader.profile(trace=True) as report:
            for _ in loader:
                pass
        result = report.result
        loader.resize(batches=6, memory="1GiB")
        refused = caught(lambda: loader.resize("read", workers=2))
        return {
            "stages": [row.name for row in result.stages],
            "stall": sorted(result.stall.by_stage),
            "total": [result.stall.total_s, sum(result.stall.by_stage.values())],
            "verdict": [result.verdict.stage, result.verdict.change],
            "text": str(report),
            "tuning": result.tuning,
            "refused": refused,
            "yaml": loader.to_yaml(),
        }


# ------------------------------------------------------------------------------------------------------- bad samples


def fails_often(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["0"] % 7 == 3:
        raise ValueError(f"{sample['0']} is a bad one")
    return sample


def numbers(num: int = 60) -> Pipeline:
    return Pipeline.dataset(list(range(num))).shuffle("global", seed=1).epochs(2).read().call(fails_often).batch(4)


def of_numbers(batch: Mapping[str, Any]) -> list[int]:
    values: list[int] = batch["0"].tolist()
    return values


@scenario
def raises(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    """The error comes on all ranks, and again when the loop goes on."""
    with build(numbers()) as loader:
        return [caught(lambda: [*loader]), loader.state_dict()["position"], caught(lambda: [*loader])]


@scenario
def skips(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    path = str(folder / "quarantine.jsonl")
    with build(numbers(), errors__on_bad_sample="skip", errors__quarantine=path) as loader:
        return [of_numbers(batch) for batch in loader]


@scenario
def replaces(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    with build(numbers(), errors__on_bad_sample="replace") as loader:
        return [of_numbers(batch) for batch in loader]


@scenario
def too_many(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    with build(numbers(), errors__on_bad_sample="skip", errors__max_bad_samples=3) as loader:
        return caught(lambda: [*loader])


def is_kept(sample: dict[str, Any]) -> bool:
    return bool(sample["0"] % 3 == 0 or sample["0"] < 30)


@scenario
def filters(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    """Some batches are empty, and skipped."""
    pipeline = Pipeline.dataset(list(range(60))).shuffle("none").read().filter(is_kept, on_empty_batch="skip").batch(2)
    with build(pipeline.epochs(2)) as loader:
        return [of_numbers(batch) for _ in range(2) for batch in loader]


# --------------------------------------------------------------------------------------------------------- iterables


class Counter:
    """An iterable of an unknown number of items, with a state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 50:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@scenario
def iterables(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    pipeline = Pipeline.iterable("mesh_scenarios:Counter").read().batch(4)
    with build(pipeline) as loader:
        seen = [of_numbers(batch) for batch in loader]
        seen += [of_numbers(batch) for batch, _ in zip(loader, range(5), strict=False)]
        state = json.loads(json.dumps(loader.state_dict()))
    with build(pipeline) as loader:
        loader.load_state_dict(state)
        return [seen, state, [of_numbers(batch) for batch in loader]]


# ------------------------------------------------------------------------------------------------------------- errors


def with_a_lock(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"lock": threading.Lock()}


@scenario
def unsendable(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    with build(Pipeline.dataset(list(range(8))).read().call(with_a_lock).batch(4)) as loader:
        return caught(lambda: [*loader])


@scenario
def differ(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    with build(numbers(), stages__batch__size=4 + (rank == 2)) as loader:
        return caught(lambda: [*loader])


@scenario
def go_apart(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    """Rank 3 loads another state."""
    with build(files()) as loader:
        next(iter(loader))
        state = loader.state_dict()
        if rank == 3:
            state["position"] += 4
        loader.load_state_dict(state)
        return caught(lambda: [*loader])


@scenario
def leave(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    """Rank 1 takes two batches and closes its loader; the others have what came before, and are told."""
    with build(files()) as loader:
        iterator = iter(loader)
        seen = [digest(next(iterator)) for _ in range(2)]
        error = [] if rank == 1 else caught(lambda: seen.extend(map(digest, iterator)))
        return [len(seen), error]


release = threading.Event()


def hangs(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["0"] == 11:
        release.wait()
    return sample


@scenario
def times_out(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    pipeline = Pipeline.dataset(list(range(60))).shuffle("none").read().call(hangs).batch(4)
    with build(pipeline, prefetch__timeout=1, prefetch__on_timeout="raise") as loader:
        error = caught(lambda: [*loader])
        release.set()
        return error


@scenario
def closes(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    """Closed with batches on their way, before any, and twice; nothing of the loader is left."""
    loader = build(files())
    loader.close()
    loader = build(files())
    loader.start()
    loader.close()
    loader = build(files())
    next(iter(loader))
    loader.close()
    loader.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("loaderkit")]
    try:
        next(iter(loader))
    except ClosedError as error:
        return [left, str(error)]
    return left


@scenario
def closes_while_connecting(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    """The last rank is still connecting when the others, which have connected, close: what it needs stays open until then."""
    said: list[str] = []
    connect, connected = dist.ProcessGroupGloo, threading.Event()

    def connect_and_tell(*args: Any) -> Any:
        group: Any = connect(*args)
        connected.set()
        if rank == 3:
            default_store().wait([f"closes-{other}" for other in range(3)])
            try:
                group.recv([torch.empty(1, dtype=torch.uint8)], 0, 77).wait(timedelta(seconds=0.3))
            except RuntimeError as error:
                said.append(str(error))
        return group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupGloo", connect_and_tell)
        with build(files()) as loader:
            loader.start()
            assert connected.wait(60)
            default_store().set(f"closes-{rank}", "")
    return said


@scenario
def alone(build: Callable[..., Loader], rank: int, folder: Path) -> Any:
    """Where no rank needs the same batch, nothing is shared: no thread, no row."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with built(mesh, files(), prefetch__concurrency=1) as loader:
        iterator = iter(loader)
        next(iterator)
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("loaderkit"))
        return [names, [row["name"] for row in loader.stats().to_dict()["stages"]], loader.stats().tuning.reader]
