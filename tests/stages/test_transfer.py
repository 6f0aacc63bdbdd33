from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpus import FakeGpus
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transferred import HAS_CUDA, Attributes, Frozen, Items, Noted, Pair, Star, assert_equal, batches, nest, pipeline

import loaderkit
from loaderkit._internal.cuda.device import resolve_device
from loaderkit._internal.cuda.streams import STREAMS
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.errors import ConfigError
from loaderkit.stages.transfer import TransferStream

without_cuda = pytest.mark.skipif(HAS_CUDA, reason="this machine has CUDA")


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

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Late) -> float:
        assert Late.devices[-1] == torch.device("meta")
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        assert Late.devices[-1] == torch.device("meta")
        assert all(source() is not None for source in Late.under_way), "memory is let go of that is still copied from"
        Late.under_way.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> TransferStream:
    """A lane to the device `meta`, whose copies are late."""
    moved, copied = torch.Tensor.to, torch.Tensor.copy_

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("non_blocking"):
            Late.under_way.append(weakref.ref(tensor))
        return moved(tensor, *args, **kwargs)

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            Late.under_way.append(weakref.ref(source if source._base is None else source._base))
        return copied(target, source)

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        Late.devices.append(wanted)
        yield
        Late.devices.pop()

    @contextmanager
    def stream(wanted: Late) -> Iterator[None]:
        assert Late.devices[-1] == torch.device("meta"), "its exit makes the device current that was so before"
        yield

    Late.under_way, Late.devices = [], []
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Late)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Late())
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(STREAMS, "_free", {})
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

    def test_what_was_copied_and_how_long_it_took(self, late: TransferStream, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
        late.run(late.move, {"a": torch.ones(2**21), "b": "text", "c": torch.ones(2**20)})
        late.run(late.move, {"a": torch.ones(2**21, device="meta"), "b": torch.ones(2)})  # one is there already
        assert late.counters() == {
            "num_bytes": 12 * 2**20 + 8,
            "timed_bytes": 12 * 2**20,  # not what is small
            "copy_s": pytest.approx(0.006),  # 2 ms for 4 MiB
            "exposed_s": 0.0,
        }

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

    @pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta")
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
        late.hand_over({"nested": nested, "sparse": [torch.eye(2).to_sparse()], "dense": {"x": torch.ones(7)}}, 0.0)
        assert [part.numel() for part in noted] == [5, 4, 2, 7]
        assert not any(part.is_nested or part.is_sparse for part in noted)

    def test_what_is_large_and_in_no_slab_is_pinned_first(
        self, late: TransferStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        pinned: list[int] = []
        kept: dict[int, torch.Tensor] = {}  # by address
        empty_like = torch.empty_like

        def pin(tensor: torch.Tensor, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            made = empty_like(tensor, **options)
            if pin_memory:
                if len(pinned) == 4:
                    raise RuntimeError("CUDA error: out of memory")
                pinned.append(tensor.numel())
                kept[made.data_ptr()] = made
            return made

        monkeypatch.setattr(torch, "empty_like", pin)
        monkeypatch.setattr(
            torch.Tensor, "is_pinned", lambda tensor: tensor.numel() == 30_000 or tensor.data_ptr() in kept
        )
        large = [torch.ones(20_000), torch.ones(30_000), torch.ones(40_000)]
        batch: dict[str, Any] = {"small": torch.ones(10), "large": large}
        batch |= {"gaps": torch.ones(20_000, 50)[:, 1], "many times": torch.ones(1, 10).expand(9_000, 10)}
        late.move(batch)
        assert late.counters()["num_bytes"] == 4 * (10 + 20_000 + 30_000 + 40_000 + 20_000 + 90_000)
        assert pinned == [20_000, 40_000, 20_000, 90_000], "not what is small, or pinned already"
        assert Late.under_way == []
        for _ in range(2):  # where no more can be pinned, it is copied all the same
            batch = {"large": torch.ones(2**20)}
            late.run(late.move, batch)
            assert batch["large"].is_meta
        assert late.counters()["timed_bytes"] == 0, "a copy that blocks is over when it has been asked for"
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
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def run(self, act: Any, *args: Any) -> None: ...

        def bound(self, function: Any) -> Any:
            bound.append(function)
            return function

        def close(self) -> None: ...

    def on_sample(sample: dict[str, Any]) -> None:
        sample["at"] = "sample"

    def on_batch(batch: dict[str, Any]) -> None:
        batch["at"] = "batch"

    monkeypatch.setattr("loaderkit.stages.transfer.resolve_device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr("loaderkit.stages.transfer.TransferStream", Noting)
    made = loaderkit.Pipeline.dataset(Items()).read().call(on_sample, timeout="5s").batch(8)
    loaderkit.build(made.call(on_batch, timeout="5s").transfer().call(on_batch, timeout="5s")).close()
    given: list[dict[str, Any]] = [{} for _ in bound]
    for function, batch in zip(bound, given, strict=True):
        function(batch, None)
    assert given == [{"at": "batch"}] * 2


def test_a_closed_loader_s_stream_is_the_next_one_s() -> None:
    """The memory of its batches is cached for the stream."""
    with FakeGpus().installed() as gpus:
        loaders = []
        for _ in range(5):
            loaders.append(loaderkit.build(pipeline(device="cuda:1")))
            loaders[-1].close()
            loaders[-1].close()
        assert len(gpus.streams) == 1
        with loaderkit.build(pipeline(device="cuda:1")), loaderkit.build(pipeline(device="cuda:1")):
            assert len(gpus.streams) == 2, "a stream has one loader at a time"
        dropped = loaderkit.build(pipeline(device="cuda:1"))
        del dropped
        gc.collect()
        loaderkit.build(pipeline(device="cuda:1")).close()
        assert len(gpus.streams) == 2
        assert gpus.contexts == set()


def test_copies_in_the_statistics() -> None:
    """The loop may wait for a stage for long without waiting for its copies."""
    with loaderkit.build(pipeline()) as loader:
        assert loader.stats().to_dict()["transfer"] == {}
        copies = {"num_bytes": 1100.0, "timed_bytes": 1000.0, "copy_s": 0.5, "exposed_s": 0.5}
        before = replace(loader.stats(), copies=copies)
    rows = [*before.stages, StageStats("move", 1, kind="transfer")]
    copies = {"num_bytes": 3200.0, "timed_bytes": 3000.0, "copy_s": 1.5, "exposed_s": 0.75}
    later = replace(before, copies=copies, stages=rows, waits_s={"move": 25.0, "decode": 5.0})
    assert later.since(replace(before, stages=rows, waits_s={})).to_dict()["transfer"] == {
        "num_bytes": 2100,
        "timed_bytes": 2000,
        "copy_s": 1.0,
        "exposed_s": 0.25,
        "bytes_per_s": 2000.0,
        "overlap": 0.75,
    }
    later = replace(later, copies={"num_bytes": 5.0, "timed_bytes": 0.0, "copy_s": 0.0, "exposed_s": 0.0})
    assert "overlap" not in later.to_dict()["transfer"], "nothing was timed"
