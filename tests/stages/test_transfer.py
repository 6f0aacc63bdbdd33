from __future__ import annotations

import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
from conftest import HELPERS
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import loaderkit
from loaderkit._internal.device import resolve_device
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.errors import ConfigError
from loaderkit.pipeline.slabs import Slab
from loaderkit.stages.transfer import TransferStream

HAS_CUDA = torch.cuda.is_available()
without_cuda = pytest.mark.skipif(HAS_CUDA, reason="this machine has CUDA")


class Items:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = torch.full((3, 8, 8), index, dtype=torch.uint8)
        return {"image": pixels, "x": torch.full((4,), index), "label": index, "text": str(index)}


class Large:
    """Pictures of one colour, their number."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.full((3, 448, 448), index, dtype=torch.uint8), "label": index}


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


def pack(batch: dict[str, Any]) -> None:
    batch["packed"] = pack_sequence([x[: 1 + n % 3] for n, x in enumerate(batch["x"])], enforce_sorted=False)
    batch["sparse"] = batch["x"].to_sparse()


class Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Noted(dict[str, Any]):
    """Its items are noted as attributes, too."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class Star(tuple[Any, ...]):
    """Its type is called with its items one by one."""

    def __new__(cls, *items: Any) -> Star:
        return super().__new__(cls, items)


class Frozen(dict[str, Any]):
    def clear(self) -> None:
        raise TypeError("it is not to be changed")


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
        for batch in batches(stages.transfer("cpu", dtype="float16", channels_last=True)):
            first, (second, text), inner = batch["found"]
            assert {first.dtype, second.dtype, inner["pair"].left.dtype} == {torch.float16}
            assert (text, type(inner["pair"]), inner["pair"].right) == ("text", Pair, 1)
            assert batch["image"].dtype == torch.uint8
            assert batch["image"].is_contiguous(memory_format=torch.channels_last)

    def test_containers_keep_their_types(self) -> None:
        class Named(list[Any]):
            name = "of its own"

        def nested(batch: dict[str, Any]) -> dict[str, Any]:
            x, plain = batch["x"].float(), OrderedDict(b=1, a=[2])
            many, attributes = defaultdict(list, x=[x]), Attributes(x=x, y=1)
            found = Named([x, 1])
            found.name = "kept"
            frozen, pair, noted, star = Frozen(x=x), x.max(0), Noted(), Star(x, 1)
            noted["x"], star.name = x, "kept"  # type: ignore[attr-defined]
            return {
                "noted": noted,
                "star": star,
                "attributes": attributes,
                "frozen": frozen,
                "pair": pair,
                "many": many,
                "named": found,
                "plain": plain,
                "size": x.shape,
                "ordered": OrderedDict(b=x, a=1),
            }

        stages = loaderkit.Pipeline.dataset(Items()).read().batch(8).call(nested)
        for batch in batches(stages.transfer("cpu", dtype="float16")):
            assert (type(batch["many"]), batch["many"]["none"]) == (defaultdict, [])
            assert (type(batch["named"]), batch["named"].name) == (Named, "kept")
            assert batch["noted"]["x"] is batch["noted"].x
            assert (type(batch["star"]), len(batch["star"]), batch["star"][1], batch["star"].name) == (
                Star,
                2,
                1,
                "kept",
            )
            assert {batch["noted"].x.dtype, batch["star"][0].dtype} == {torch.float16}
            assert batch["attributes"]["x"] is batch["attributes"].x
            assert (batch["attributes"].x.dtype, batch["attributes"].y) == (torch.float16, 1)
            assert batch["frozen"]["x"].dtype == torch.float16
            assert type(batch["frozen"]) is dict, "where its type does not let itself be filled"
            assert batch["pair"].values.dtype == torch.float16
            assert (type(batch["ordered"]), list(batch["ordered"])) == (OrderedDict, ["b", "a"])
            assert {batch["many"]["x"][0].dtype, batch["named"][0].dtype, batch["ordered"]["b"].dtype} == {
                torch.float16
            }
            assert (type(batch["plain"]), type(batch["size"])) == (OrderedDict, torch.Size), "nothing in them changed"

    @pytest.mark.parametrize("position", ["before", "after"])
    def test_channels_last_keeps_the_values(self, position: str) -> None:
        stages = loaderkit.Pipeline.dataset(Items()).shuffle("global", seed=3).read().decode(fields=["image"]).batch(8)
        made = (
            stages.transfer("cpu", channels_last=True).normalize()
            if position == "before"
            else stages.normalize().transfer("cpu", channels_last=True)
        )
        found = batches(made)
        assert all(batch["image"].is_contiguous(memory_format=torch.channels_last) for batch in found)
        assert_equal(found, batches(pipeline()))

    @pytest.mark.parametrize("position", ["before", "after"])
    def test_floats_are_cast_where_it_stands(self, position: str) -> None:
        stages = loaderkit.Pipeline.dataset(Items()).shuffle("global", seed=3).read().decode(fields=["image"]).batch(8)
        if position == "before":  # pixels are still uint8 then
            found = batches(stages.transfer("cpu", dtype="bfloat16").normalize())
            assert_equal(found, batches(pipeline()))
        else:
            found = batches(stages.normalize().transfer("cpu", dtype="bfloat16"))
            assert {batch["image"].dtype for batch in found} == {torch.bfloat16}
            for one, other in zip(found, batches(pipeline()), strict=True):
                assert torch.equal(one["image"], other["image"].to(torch.bfloat16))
                assert torch.equal(one["x"], other["x"]), "whole numbers stay what they are"


class Late:
    """A CUDA stream, and its events, on which copies have been made only when an event behind them was waited for."""

    under_way: list[weakref.ref[torch.Tensor]]
    devices: list[torch.device]  # the current one is the last

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at_ms = 0.0

    def wait_stream(self, stream: Any) -> None:
        """All is done before."""

    def record(self, stream: Late) -> None:
        stream.at_ms += 2.0
        self.at_ms = stream.at_ms

    def elapsed_time(self, end: Late) -> float:
        assert Late.devices == [torch.device("meta")]
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        assert Late.devices == [torch.device("meta")]
        assert all(source() is not None for source in Late.under_way), "memory is let go of that is still copied from"
        Late.under_way.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> TransferStream:
    """A lane to the device `meta`, whose copies are late."""
    moved = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("non_blocking"):
            Late.under_way.append(weakref.ref(tensor))
        return moved(tensor, *args, **kwargs)

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        Late.devices.append(wanted)
        yield
        Late.devices.pop()

    @contextmanager
    def stream(wanted: Late) -> Iterator[None]:
        assert Late.devices == [torch.device("meta")], "its exit makes the device current that was so before"
        yield

    Late.under_way, Late.devices = [], []
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Late)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Late())
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return TransferStream(torch.device("meta"))


@without_cuda
class TestLane:
    def test_what_is_copied_is_kept_until_it_is_there(self, late: TransferStream) -> None:
        batch: dict[str, Any] = {
            "image": torch.ones(4, 3),
            "nested": [torch.ones(5), {"x": torch.ones(2)}],
            "text": "a",
        }
        late.move(batch)
        assert Late.under_way == []
        assert batch["image"].is_meta
        assert batch["nested"][1]["x"].is_meta
        assert batch["text"] == "a"

    def test_what_was_copied_and_how_long_it_took(self, late: TransferStream) -> None:
        late.move({"a": torch.ones(4, 3), "b": "text"})
        late.move({"a": torch.ones(4, 3, device="meta"), "b": torch.ones(2, dtype=torch.uint8)})  # one is there already
        assert late.counters() == {"num_bytes": 48 + 2, "copy_s": pytest.approx(0.004)}

    def test_packed_sequences(self, late: TransferStream) -> None:
        """Their sizes stay on the CPU, as torch wants them."""
        packed = pack_sequence([torch.ones(n) for n in (2, 5, 3)], enforce_sorted=False)
        batch: dict[str, Any] = {"packed": [packed]}
        late.move(batch)
        found = batch["packed"][0]
        assert isinstance(found, PackedSequence)
        assert found.data.is_meta
        assert found.sorted_indices is not None
        assert found.sorted_indices.is_meta
        assert torch.equal(found.batch_sizes, packed.batch_sizes)
        assert late.counters()["num_bytes"] == 10 * 4 + 2 * 3 * 8

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    @pytest.mark.parametrize(
        ("make", "num_bytes"),
        [
            (lambda: torch.eye(3).to_sparse(), 2 * 3 * 8 + 3 * 4),
            (lambda: torch.eye(3).to_sparse_csr(), (4 + 3) * 8 + 3 * 4),
            (lambda: torch.eye(4).to_sparse_bsc((2, 2)), (3 + 2) * 8 + 2 * 4 * 4),
            (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 5 * 4 + 3 * 8),
            (
                lambda: torch.nested.narrow(torch.ones(2, 6), 1, 0, torch.tensor([2, 3]), layout=torch.jagged),
                12 * 4 + 3 * 8 + 2 * 8,
            ),
        ],
        ids=["coo", "csr", "bsc", "jagged", "jagged with holes"],
    )
    def test_sparse_and_nested_tensors(
        self, late: TransferStream, make: Callable[[], torch.Tensor], num_bytes: int
    ) -> None:
        made = make()
        batch = {"x": made}
        late.move(batch)
        assert batch["x"].is_meta
        assert batch["x"].layout is made.layout
        assert late.counters()["num_bytes"] == num_bytes

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_what_a_loop_s_stream_is_told_of(self, late: TransferStream, monkeypatch: pytest.MonkeyPatch) -> None:
        """`record_stream` knows dense tensors only."""
        noted: list[torch.Tensor] = []
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: noted.append(tensor))
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        late.hand_over({"nested": nested, "sparse": [torch.eye(2).to_sparse()], "dense": {"x": torch.ones(7)}})
        assert [part.numel() for part in noted] == [5, 4, 2, 7]
        assert not any(part.is_nested or part.is_sparse for part in noted)

    def test_what_is_large_and_in_no_slab_is_pinned_first(
        self, late: TransferStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        pinned: list[int] = []
        empty_like = torch.empty_like

        def pin(tensor: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
            if len(pinned) == 4:
                raise RuntimeError("CUDA error: out of memory")
            pinned.append(tensor.numel())
            return empty_like(tensor)

        monkeypatch.setattr(torch, "empty_like", pin)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.numel() == 30_000)
        large = [torch.ones(20_000), torch.ones(30_000), torch.ones(40_000)]
        batch: dict[str, Any] = {"small": torch.ones(10), "large": large}
        batch |= {"gaps": torch.ones(20_000, 50)[:, 1], "many times": torch.ones(1, 10).expand(9_000, 10)}
        late.move(batch)
        assert pinned == [20_000, 40_000, 20_000, 90_000], "not what is small, or pinned already"
        assert Late.under_way == []
        for _ in range(2):  # where no more can be pinned, it is copied all the same
            batch = {"large": torch.ones(50_000)}
            late.move(batch)
            assert batch["large"].is_meta
        assert pinned == [20_000, 40_000, 20_000, 90_000]
        assert caplog.text.count("cannot be pinned (CUDA error: out of memory)") == 1

    def test_it_waits_for_what_a_stage_has_asked_for(self, late: TransferStream) -> None:
        kept: list[torch.Tensor] = []

        def act(factor: int) -> str:
            kept.append(torch.ones(3) * factor)
            kept[-1].to("meta", non_blocking=True)
            return "done"

        assert late.run(act, 2) == "done"
        assert Late.under_way == []

    def test_its_device_is_the_current_one(self, late: TransferStream) -> None:
        seen: list[list[torch.device]] = []
        late.run(lambda: seen.append([*Late.devices]))
        late.bound(lambda: seen.append([*Late.devices]))()
        assert seen == [[torch.device("meta")]] * 2
        assert Late.devices == []


def test_of_functions_with_a_time_limit_only_those_behind_batch_are_called_on_the_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one makes of a sample is read by a worker on its own stream."""
    bound: list[Any] = []

    class Noting:
        def __init__(self, device: torch.device) -> None: ...

        def run(self, act: Any, *args: Any) -> None: ...

        def bound(self, function: Any) -> Any:
            bound.append(function)
            return function

    def on_sample(sample: dict[str, Any]) -> None:
        sample["at"] = "sample"

    def on_batch(batch: dict[str, Any]) -> None:
        batch["at"] = "batch"

    monkeypatch.setattr("loaderkit.pipeline.compiler.resolve_device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr("loaderkit.pipeline.compiler.TransferStream", Noting)
    made = loaderkit.Pipeline.dataset(Items()).read().call(on_sample, timeout="5s").batch(8)
    loaderkit.build(made.call(on_batch, timeout="5s").transfer().call(on_batch, timeout="5s")).close()
    given: list[dict[str, Any]] = [{} for _ in bound]
    for function, batch in zip(bound, given, strict=True):
        function(batch, None)
    assert given == [{"at": "batch"}] * 2


def test_copies_in_the_statistics() -> None:
    with loaderkit.build(pipeline()) as loader:
        assert loader.stats().to_dict()["transfer"] == {}
        before = replace(loader.stats(), copies={"num_bytes": 1000, "copy_s": 0.5})
    rows = [*before.stages, StageStats("move", 1, kind="transfer")]
    later = replace(
        before, copies={"num_bytes": 3000, "copy_s": 1.5}, stages=rows, stall_s={"move": 0.25, "decode": 5.0}
    )
    found = later.since(replace(before, stages=rows, stall_s={})).to_dict()["transfer"]
    assert found == {"num_bytes": 2000, "copy_s": 1.0, "bytes_per_s": 2000.0, "overlap": 0.75}


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
        assert 0 < copies["copy_s"] < loader.stats().wall_s
        assert 0 <= copies["overlap"] <= 1

    @pytest.mark.parametrize("late_loop", [False, True])
    def test_slabs_are_overwritten_as_early_as_the_rules_allow(
        self, monkeypatch: pytest.MonkeyPatch, late_loop: bool
    ) -> None:
        """The moment that nothing sees a slab any more it is filled with something else; batches are 38 MB."""

        class Poisoned(SimpleQueue[Slab]):
            def put(self, item: Slab, block: bool = True, timeout: float | None = None) -> None:
                item.memory.fill(255)
                super().put(item, block, timeout)

        monkeypatch.setattr("loaderkit.pipeline.slabs.SimpleQueue", Poisoned)
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
from test_transfer import doubled, pipeline
made = pipeline(device="cuda:1").call(doubled, timeout="60s")
with loaderkit.build(made, overrides={{"prefetch.executor": {executor!r}}}) as loader:
    for batch in loader:
        assert batch["image"].device == torch.device("cuda", 1)
        assert batch["image"].dtype == torch.float32
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"twice": 2 * batch["image"]}


def keyed(batch: dict[str, Any]) -> tuple[list[str], torch.Tensor]:
    return batch["__key__"], batch["image"].double()
