from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import loaderkit
from loaderkit.errors import ConfigError
from loaderkit.stages.transfer import resolve_device

HAS_CUDA = torch.cuda.is_available()
without_cuda = pytest.mark.skipif(HAS_CUDA, reason="this machine has CUDA")


class Items:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = torch.full((3, 8, 8), index, dtype=torch.uint8)
        return {"image": pixels, "x": torch.full((4,), index), "label": index, "text": str(index)}


def pipeline(**transfer: Any) -> loaderkit.Pipeline:
    made = loaderkit.Pipeline.dataset(Items()).shuffle("global", seed=3).read().decode(fields=["image"]).batch(8)
    return (made.transfer(**transfer) if transfer else made).normalize()


def batches(made: loaderkit.Pipeline) -> list[dict[str, Any]]:
    with loaderkit.build(made) as loader:
        return list(loader)


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[name]), name
            else:
                assert value == other[name]


@pytest.mark.parametrize("device", ["cpu", pytest.param("auto", marks=without_cuda)])
def test_on_the_cpu_nothing_changes(device: str) -> None:
    assert_equal(batches(pipeline(device=device)), batches(pipeline()))
    with loaderkit.build(pipeline(device=device)) as loader:
        batch = next(iter(loader))
    assert {value.device.type for value in batch.values() if isinstance(value, torch.Tensor)} == {"cpu"}


@without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_cuda_that_is_missing_is_a_config_error(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaderkit.build(pipeline(device=device))
    message = str(caught.value)
    assert "transfer" in message
    assert f"'{device}'" in message
    assert torch.__version__ in message
    assert "CUDA" in message
    with pytest.raises(RuntimeError, match=device):
        resolve_device(device)


@without_cuda
def test_auto_without_cuda_is_the_cpu() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CUDA", "mps", "", "cuda:-1", 0])
def test_devices_that_do_not_exist(device: object) -> None:
    with pytest.raises(ConfigError, match=r"stages\.2\.transfer\.device|device"):
        _ = pipeline(device=device).config


def test_a_state_does_not_depend_on_the_device() -> None:
    with loaderkit.build(pipeline()) as plain, loaderkit.build(pipeline(device="auto")) as moved:
        assert plain.state_dict() == moved.state_dict()


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def nest(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with tensors in whatever a function may make."""
    x = batch["x"].float()
    return {"found": [x, (x, "text"), {"pair": Pair(x, 1)}], "image": batch["image"]}


class TestLayout:
    def test_tensors_in_lists_tuples_and_dicts(self) -> None:
        stages = loaderkit.Pipeline.dataset(Items()).read().decode(fields=["image"]).batch(8).call(nest)
        for batch in batches(stages.transfer(dtype="float16", channels_last=True)):
            first, (second, text), inner = batch["found"]
            assert {first.dtype, second.dtype, inner["pair"].left.dtype} == {torch.float16}
            assert (text, type(inner["pair"]), inner["pair"].right) == ("text", Pair, 1)
            assert batch["image"].dtype == torch.uint8
            assert batch["image"].is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize("position", ["before", "after"])
    def test_channels_last_keeps_the_values(self, position: str) -> None:
        stages = loaderkit.Pipeline.dataset(Items()).shuffle("global", seed=3).read().decode(fields=["image"]).batch(8)
        made = (
            stages.transfer(channels_last=True).normalize()
            if position == "before"
            else stages.normalize().transfer(channels_last=True)
        )
        found = batches(made)
        assert all(batch["image"].is_contiguous(memory_format=torch.channels_last) for batch in found)
        assert_equal(found, batches(pipeline()))

    @pytest.mark.parametrize("position", ["before", "after"])
    def test_floats_are_cast_where_it_stands(self, position: str) -> None:
        stages = loaderkit.Pipeline.dataset(Items()).shuffle("global", seed=3).read().decode(fields=["image"]).batch(8)
        if position == "before":  # pixels are still uint8 then
            found = batches(stages.transfer(dtype="bfloat16").normalize())
            assert_equal(found, batches(pipeline()))
        else:
            found = batches(stages.normalize().transfer(dtype="bfloat16"))
            assert {batch["image"].dtype for batch in found} == {torch.bfloat16}
            for one, other in zip(found, batches(pipeline()), strict=True):
                assert torch.equal(one["image"], other["image"].to(torch.bfloat16))
                assert torch.equal(one["x"], other["x"]), "whole numbers stay what they are"


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_cuda() -> None:
    expected = batches(pipeline(device="cpu"))
    with loaderkit.build(pipeline(device="cuda")) as loader:
        found = list(loader)
        torch.cuda.synchronize()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one["__key__"] == other["__key__"]
        assert one["text"] == other["text"]
        for name in ("image", "x", "label"):
            assert one[name].device.type == "cuda"
            assert one[name].dtype == other[name].dtype
            assert torch.allclose(one[name].cpu().double(), other[name].double(), rtol=0, atol=1e-6)
    # Batches kept on the device stay as they were while the slabs behind them are reused.
    assert torch.equal(found[0]["x"].cpu(), expected[0]["x"])
