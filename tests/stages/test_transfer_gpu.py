"""`transfer` on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from conftest import HELPERS
from torch.nn.utils.rnn import pad_packed_sequence
from transferred import HAS_CUDA, Items, Large, Pair, batches, keyed, nest, pack, pipeline

import loaderkit
from loaderkit.pipeline.batches.slabs import Slab


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


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("executor", ["thread", "process"])
    @pytest.mark.parametrize("late_loop", [False, True])
    def test_batches_dropped_at_once_are_not_written_over(self, executor: str, late_loop: bool) -> None:
        """The loop's stream is far behind when it has dropped a batch, and slabs and device memory are short."""
        overrides = {"prefetch.batches": 2, "prefetch.executor": executor}
        expected = {key: float(x.sum()) for batch in batches(pipeline()) for key, x in zip(*keyed(batch), strict=True)}
        stream: Any = torch.cuda.Stream() if late_loop else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        found: dict[str, torch.Tensor] = {}
        with loaderkit.build(pipeline(device="cuda"), overrides=overrides) as loader, torch.cuda.stream(stream):
            for _ in range(20):
                for batch in loader:
                    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                    sums = batch["image"].double().sum((1, 2, 3))
                    found |= dict(zip(batch["__key__"], sums, strict=True))
                    del batch
                for key, value in found.items():
                    assert value.item() == pytest.approx(expected[key], abs=1e-3)
            copies = loader.stats().to_dict()["transfer"]
        assert copies["num_bytes"] > 0

    @pytest.mark.parametrize("late_loop", [False, True])
    def test_slabs_are_overwritten_as_early_as_the_rules_allow(
        self, monkeypatch: pytest.MonkeyPatch, late_loop: bool
    ) -> None:
        """The moment that nothing sees a slab any more it is filled with something else; batches are 38 MB."""

        class Poisoned(SimpleQueue[Slab]):
            def put(self, item: Slab, block: bool = True, timeout: float | None = None) -> None:
                item.memory.fill(255)
                super().put(item, block, timeout)

        monkeypatch.setattr("loaderkit.pipeline.batches.slabs.SimpleQueue", Poisoned)
        stream: Any = torch.cuda.Stream() if late_loop else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        made = loaderkit.Pipeline.dataset(Large()).shuffle("global", seed=3).read().batch(64).transfer("cuda")
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        with loaderkit.build(made, overrides={"prefetch.batches": 2}) as loader, torch.cuda.stream(stream):
            for _ in range(5):
                for batch in loader:
                    if late_loop:
                        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
                    image = batch["image"].flatten(1)
                    found.append((torch.stack([image.amin(1), image.amax(1)]), batch["label"].clone()))
                    del batch, image
        torch.cuda.synchronize()
        assert len(found) == 5 * 4
        for (least, most), labels in found:
            assert torch.equal(least.long(), labels)
            assert torch.equal(most.long(), labels)

    def test_a_loop_that_leaves_while_copies_are_under_way(self) -> None:
        made = loaderkit.Pipeline.dataset(Large()).read().batch(64).transfer("cuda")
        for _ in range(10):
            with loaderkit.build(made, overrides={"prefetch.batches": 3}) as loader:
                for batch in loader:
                    image, label = batch["image"], batch["label"]
                    break
            assert torch.equal(image[:, 0, 0, 0].long(), label)
        torch.cuda.synchronize()

    @pytest.mark.filterwarnings("ignore")  # the profiler's own
    @pytest.mark.parametrize("executor", ["thread", "process"])
    def test_copies_take_as_long_as_the_profiler_says(self, executor: str) -> None:
        made = loaderkit.Pipeline.dataset(Large()).read().batch(64).transfer("cuda")
        with (
            loaderkit.build(made, overrides={"prefetch.executor": executor}) as loader,
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler,
        ):
            for _ in range(5):
                for batch in loader:
                    del batch
            loader.close()
            copies = loader.stats().to_dict()["transfer"]
        copied_s = sum(one.device_time_total for one in profiler.key_averages() if "HtoD" in one.key) / 1e6
        if not copied_s:
            pytest.skip("the profiler sees no copies on this machine")
        assert 0 < copies["timed_bytes"] <= copies["num_bytes"]
        assert 0 <= copies["overlap"] <= 1
        assert copies["bytes_per_s"] == pytest.approx(copies["num_bytes"] / copied_s, rel=0.15)

    def test_a_kernel_of_the_loop_that_fails(self) -> None:
        """Whoever hears of it first, the loader or the loop's next call; the loader closes all the same. In a process of its
        own, which has lost its GPU then: torch aborts it when a pinned tensor that was copied from is freed."""
        program = f"""
import os, sys
sys.path[:0] = {[*map(str, (HELPERS.parent, HELPERS, Path(__file__).parent))]!r}
import torch
import loaderkit
from loaderkit.errors import DeviceError
from transferred import pipeline
try:
    with loaderkit.build(pipeline(device="cuda")) as loader:
        for epoch in range(5):
            for batch in loader:
                batch["x"][:, torch.tensor([99], device="cuda")]
except RuntimeError as error:
    assert type(error) in (DeviceError, getattr(torch, "AcceleratorError", RuntimeError)), error
    assert "device-side assert" in str(error), error
    os._exit(7)  # without the destructors of what CUDA has lost
"""
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7

    def test_containers_and_dtypes(self) -> None:
        stages = loaderkit.Pipeline.dataset(Items()).read().decode(fields=["image"]).batch(8).call(nest)
        with loaderkit.build(stages.transfer("cuda", dtype="float16", channels_last=True)) as loader:
            for batch in loader:
                first, (second, text), inner = batch["found"]
                assert {first.dtype, second.dtype, inner["pair"].left.dtype} == {torch.float16}
                assert {first.device.type, second.device.type, inner["pair"].left.device.type} == {"cuda"}
                assert (text, type(inner["pair"]), inner["pair"].right) == ("text", Pair, 1)
                assert batch["image"].is_contiguous(memory_format=torch.channels_last)

    def test_packed_and_sparse(self) -> None:
        with loaderkit.build(pipeline(device="cpu").call(pack)) as loader:
            expected = list(loader)
        made = loaderkit.Pipeline.dataset(Items()).shuffle("global", seed=3).read().decode(fields=["image"]).batch(8)
        with loaderkit.build(made.call(pack).transfer("cuda")) as loader:
            for batch, other in zip(loader, expected, strict=True):
                padded, sizes = pad_packed_sequence(batch["packed"])
                wanted, wanted_sizes = pad_packed_sequence(other["packed"])
                assert padded.is_cuda
                assert torch.equal(padded.cpu(), wanted)
                assert torch.equal(sizes, wanted_sizes)
                assert torch.equal(batch["sparse"].to_dense().cpu(), other["sparse"].to_dense())

    def test_memory_that_cannot_be_pinned(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Refuses:
            def __getattr__(self, name: str) -> Any:
                return lambda *args: 2

        expected = batches(pipeline(device="cpu"))
        monkeypatch.setattr(torch.cuda, "cudart", Refuses)
        with loaderkit.build(pipeline(device="cuda"), overrides={"prefetch.executor": "process"}) as loader:
            found = [{**batch, "image": batch["image"].cpu(), "x": batch["x"].cpu()} for batch in loader]
        assert caplog.text.count("cannot be pinned (CUDA error 2)") == 1
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one["image"], other["image"], rtol=0, atol=1e-6)
            assert torch.equal(one["x"], other["x"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_another_device_is_left_alone(executor: str) -> None:
    program = f"""
import sys
sys.path[:0] = {[*map(str, (HELPERS.parent, HELPERS, Path(__file__).parent))]!r}
import torch
import loaderkit
from transferred import doubled, pipeline
made = pipeline(device="cuda:1").call(doubled, timeout="60s")
with loaderkit.build(made, overrides={{"prefetch.executor": {executor!r}}}) as loader:
    for batch in loader:
        assert batch["image"].device == torch.device("cuda", 1)
        assert batch["image"].dtype == torch.float32
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
