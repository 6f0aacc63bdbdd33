"""What every executor promises: the same batches, errors, states and accounts, however the work is done."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray_clusters import RAY

import loaderkit
from loaderkit import Loader, Pipeline
from loaderkit.errors import ClosedError, StageError, TooManyBadSamplesError

EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"prefetch.executor": "inline"},
    "one thread": {"prefetch.concurrency": 1},
    "eight threads": {"prefetch.concurrency": 8, "prefetch.batches": 16},
    "a pool a stage": {"stages.read.workers": 2, "stages.call.workers": 2, "stages.batch.workers": 1},
    "pools of batches": {"stages.call-2.workers": 2, "stages.transfer.workers": 1},
    "a process": {"prefetch.executor": "process", "prefetch.concurrency": 2},
    "a process of pools": {"prefetch.executor": "process", "stages.read.workers": 2, "stages.call-2.workers": 1},
    "two processes": {"prefetch.executor": "process", "prefetch.processes": 2},
    "three processes of pools": {
        "prefetch.executor": "process",
        "prefetch.processes": 3,
        "prefetch.batches": 7,
        "stages.read.workers": 2,
        "stages.call-2.workers": 4,
    },
    "two actors": RAY,
    "three actors of pools": RAY
    | {"prefetch.processes": 3, "prefetch.batches": 7, "stages.read.workers": 2, "stages.call-2.workers": 4},
}


class Squares:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index * index}


def jitter(sample: dict[str, Any], rng: Any) -> None:
    if sample["__key__"] == "33":
        raise ArithmeticError("thirty-three")
    sample["y"] = int(rng.integers(10**6))


def total(batch: dict[str, Any], rng: Any) -> None:
    batch["total"] = int(batch["x"].sum()) + int(rng.integers(1000))


LONG = {"a process", "a process of pools", "three processes of pools", "two actors", "three actors of pools"}


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    is_ray = EXECUTORS[name].get("prefetch.executor") == "ray"
    return [mark for mark, is_so in ((pytest.mark.prove, name in LONG), (pytest.mark.integration, is_ray)) if is_so]


@pytest.fixture(params=[pytest.param(name, marks=marks_of(name)) for name in EXECUTORS])
def make(request: pytest.FixtureRequest) -> Callable[..., Loader]:
    if EXECUTORS[request.param].get("prefetch.executor") == "ray":
        request.getfixturevalue("ray_nodes")
    pipeline = Pipeline.dataset(Squares()).shuffle(seed=2).read().call(jitter).batch(4).call(total).transfer()
    return lambda **more: loaderkit.build(pipeline, overrides={**EXECUTORS[request.param], **more})


def rows(loader: Loader) -> list[Any]:
    return [(b["__key__"], b["x"].tolist(), b["y"].tolist(), b["total"]) for b in loader]


def test_batches(make: Callable[..., Loader]) -> None:
    reference = Pipeline.dataset(Squares()).shuffle(seed=2).read().call(jitter).batch(4).call(total).transfer()
    for policy in ("skip", "replace"):
        overrides = {"errors.on_bad_sample": policy}
        with loaderkit.build(reference, overrides={**overrides, **EXECUTORS["inline"]}) as plain:
            expected = [rows(plain), rows(plain)]
        with make(**overrides) as loader:
            assert [rows(loader), rows(loader)] == expected
        keys = [key for keys, *_ in expected[0] for key in keys]
        assert "33" not in keys
        assert len(keys) == (49 if policy == "skip" else 50)


def test_the_error_comes_in_its_place(make: Callable[..., Loader]) -> None:
    with make(**{"errors.on_bad_sample": "skip"}) as loader:
        good = rows(loader)
    with make() as loader:
        stream = iter(loader)
        seen = []
        with pytest.raises(StageError, match=r"'33'.*thirty-three"):
            for batch in stream:
                seen.append(batch["__key__"])  # noqa: PERF401 - what came before the error counts
        place = loader.state_dict()["position"] // 4
        assert seen == [keys for keys, *_ in good][:place]
        assert not [t for t in threading.enumerate() if t.name.startswith("loaderkit")]


def test_quarantine_and_bounds(make: Callable[..., Loader], tmp_path: Path) -> None:
    """One line for every bad sample and epoch, the same with every executor; one too many stops the loop."""
    lines = []
    for number, executor in enumerate(({}, EXECUTORS["inline"] | {"prefetch.ray": {}})):
        quarantine = tmp_path / f"{number}.jsonl"
        policy = {"errors.on_bad_sample": "skip", "errors.quarantine": str(quarantine)}
        with make(**policy, **executor) as opened:
            rows(opened)
            rows(opened)
        lines.append(quarantine.read_text().splitlines())
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2
    with make(**{"errors.on_bad_sample": "skip", "errors.max_bad_samples": 0}) as opened:
        with pytest.raises(TooManyBadSamplesError) as caught:
            rows(opened)
        assert isinstance(caught.value.__cause__, StageError)
        assert isinstance(caught.value.__cause__.__cause__, ArithmeticError)


def test_resume_and_accounts(make: Callable[..., Loader]) -> None:
    with make(**{"errors.on_bad_sample": "replace"}) as loader:
        expected = rows(loader)
        stats = loader.stats()
        assert (stats.num_batches, stats.num_samples) == (13, 50)
        assert stats.stages[0].num_items >= 50
        assert sum(stage.num_failed for stage in stats.stages) >= 1
    with make(**{"errors.on_bad_sample": "replace"}) as loader:
        stream = iter(loader)
        for _ in range(5):
            next(stream)
        state = loader.state_dict()
    with make(**{"errors.on_bad_sample": "replace"}) as loader:
        loader.load_state_dict(state)
        assert rows(loader) == expected[5:]


def test_leaving_at_any_point_leaves_nothing(make: Callable[..., Loader]) -> None:
    before = threading.active_count()
    for num_batches in (0, 1, 4):
        loader = make(**{"errors.on_bad_sample": "skip"})
        stream = iter(loader)
        for _ in range(num_batches):
            next(stream)
        loader.close()
        with pytest.raises(ClosedError):
            next(stream)
    del loader, stream
    gc.collect()
    assert threading.active_count() == before


class Mixed:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.ones(index % 3 + 1, device="cpu")
        picture = torch.full((3, 4, 5), index, dtype=torch.uint8, device="cpu")
        return {"int": index, "float": 0.5, "numpy": np.float32(index), "words": words, "picture": picture}


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_the_default_device_is_the_models(executor: str, photos: Path) -> None:
    """Batches are made on the CPU wherever the trainer makes its own tensors."""
    mixed = Pipeline.dataset(Mixed()).shuffle("none").read().batch(4, ragged={"words": "pad"})
    images = Pipeline.files(photos).shuffle("none").read().decode().resize([8, 8]).batch(4).normalize()
    torch.set_default_device("meta")
    try:
        for pipeline in (mixed.normalize(fields=["picture"]), images):
            with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
                batch = next(iter(loader))
            tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
            assert {tensor.device.type for tensor in tensors} == {"cpu"}
            assert all(torch.isfinite(tensor.double()).all() for tensor in tensors)
    finally:
        torch.set_default_device(None)
