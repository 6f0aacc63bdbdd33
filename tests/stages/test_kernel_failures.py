"""A kernel of the training step has failed, and a loader is the first to hear of it: no stage and no sample is to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transferred import Items

import loaderkit
from loaderkit.errors import DeviceError, StageError

ASSERTED = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


class Broken:
    """A stream to a GPU that has failed."""

    device = torch.device("cuda", 0)
    error: Exception

    def __init__(self, *args: Any) -> None: ...

    def run(self, act: Callable[..., Any], *args: Any) -> Any:
        raise self.error

    def hand_over(self, batch: dict[str, Any], asked_s: float) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> type[Broken]:
    monkeypatch.setattr("loaderkit.stages.transfer.resolve_device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr("loaderkit.stages.transfer.TransferStream", Broken)
    monkeypatch.setattr("loaderkit._internal.cuda.pinned.PinnedMemory.take", lambda memory, num_bytes: None)
    return Broken


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_a_batch(broken: type[Broken], executor: str) -> None:
    pipeline = loaderkit.Pipeline.dataset(Items()).read().batch(8).transfer()
    with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
        broken.error = torch.AcceleratorError(ASSERTED)
        with pytest.raises(DeviceError, match="transfer, with batch 0 of epoch 0, was the next") as caught:
            next(iter(loader))
        assert caught.value.__cause__ is broken.error
        broken.error = torch.OutOfMemoryError("CUDA out of memory")
        with pytest.raises(StageError, match="transfer failed for batch 0"):
            next(iter(loader))


@pytest.mark.parametrize("executor", ["inline", "thread"])
@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_a_sample_is_not_bad_for_it(policy: str, executor: str) -> None:
    seen: list[str] = []
    bad = "19"  # not among those that the types of a batch are taken from

    def on_gpu(sample: dict[str, Any]) -> None:
        if sample["__key__"] == bad:
            seen.append(sample["__key__"])
            raise torch.AcceleratorError(ASSERTED)

    pipeline = loaderkit.Pipeline.dataset(Items()).read().call(on_gpu).batch(8)
    overrides = {"errors.on_bad_sample": policy, "prefetch.executor": executor, "order.shuffle": "none"}
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        batches = iter(loader)
        assert next(batches)["label"].tolist() == [*range(8)], "what came before is delivered"
        assert next(batches)["label"].tolist() == [*range(8, 16)]
        with pytest.raises(DeviceError, match=f"call, with sample '{bad}', was the next"):
            next(batches)
        assert loader.stats().to_dict()["stages"][1]["num_failed"] == 0
    assert seen == [bad], "it is not tried again"
