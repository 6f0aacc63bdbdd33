"""Filling tensors that are there: what is checked before anything is touched, and what shares memory."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import saved

import loaderkit
from loaderkit.checkpoint.restore.requests import overlaps_itself
from loaderkit.connectors.base import Connector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError, ConfigError, ConnectorError


def store(**tensors: torch.Tensor) -> dict[str, Any]:
    return {"connectors": {"memory": MemoryConnector({"x": safetensors.torch.save(tensors)})}}


def test_a_whole_training_state(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 8)).pow(2).sum().backward()
        optimizer.step()

    model, optimizer = make()
    train(model, optimizer)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "loader": {"epoch": 3, "position": 128, "seed": 7},
        "step": 12,
    }
    torch.save(state, tmp_path / "x.pt")
    train(model, optimizer)
    wanted = [p.detach().clone() for p in model.parameters()]

    other, again = make()
    train(other, again)  # so that the optimizer has state to be filled
    into = {
        "model": other.state_dict(),
        "optimizer": again.state_dict(),
        "rng": torch.get_rng_state(),
        "loader": {"epoch": 0, "position": 0, "seed": 0},
        "step": 0,
    }
    assert loaderkit.restore(tmp_path / "x.pt", into) is into
    again.load_state_dict(into["optimizer"])
    torch.set_rng_state(into["rng"])
    assert into["loader"] == {"epoch": 3, "position": 128, "seed": 7}
    assert into["step"] == 12
    train(other, again)
    for parameter, value in zip(other.parameters(), wanted, strict=True):
        assert torch.equal(parameter, value)


def test_names_are_compared_before_a_byte_is_read() -> None:
    target = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        loaderkit.restore("memory://x", {"a": target, "c": torch.zeros(1)}, **store(a=torch.ones(2), b=torch.ones(1)))
    assert caught.value.missing == ("c",)
    assert caught.value.unexpected == ("b",)
    assert "strict=False" in str(caught.value)
    assert not target.any()
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint \(1\): c"):
        loaderkit.restore("memory://x", {"a": target, "c": torch.ones(1)}, strict=False, **store(a=torch.ones(3)))
    loaderkit.restore("memory://x", {"a": target}, strict=False, **store(a=torch.ones(2), b=torch.ones(1)))
    assert target.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (torch.zeros(3), r"'a' has shape \[3\], and \[2\] in the checkpoint"),
        (torch.zeros(2, dtype=torch.int32), r"'a' is torch.int32, and torch.float32 in the checkpoint"),
        (torch.zeros(2, dtype=torch.bfloat16), "dtype='target' casts"),
        (torch.zeros(2, device="meta"), "to_empty"),
        (torch.zeros(1).expand(2), "elements share memory"),
        (torch.zeros(2).to_sparse(), "only plain tensors"),
    ],
)
def test_what_does_not_fit(target: torch.Tensor, match: str) -> None:
    good = torch.zeros(2)
    with pytest.raises(CheckpointError, match=match):
        loaderkit.restore("memory://x", {"a": target, "b": good}, **store(a=torch.ones(2), b=torch.ones(2)))
    assert not good.any()


def test_what_is_no_state() -> None:
    with pytest.raises(ConfigError, match=r"module\.state_dict\(\)"):
        loaderkit.restore("memory://x", torch.nn.Linear(2, 2), **store(a=torch.ones(2)))
    with pytest.raises(ConfigError, match="only floating-point"):
        loaderkit.restore("memory://x", dtype="int8", **store(a=torch.ones(2)))
    with pytest.raises(ConfigError, match="needs `into`"):
        loaderkit.restore("memory://x", dtype="target", **store(a=torch.ones(2)))
    with pytest.raises(CheckpointError, match=r"no name that matches 'layr.*did you mean 'layer'"):
        loaderkit.restore("memory://x", keys="layr", **store(layer=torch.ones(2)))
    with pytest.raises(ConfigError, match="memory is"):
        loaderkit.restore("memory://x", memory="8KiB", **store(a=torch.ones(2)))
    with pytest.raises(ConfigError, match="concurrency 0: expected 'auto', or a number of threads from 1 on"):
        loaderkit.restore("memory://x", concurrency=0, **store(a=torch.ones(2)))
    with pytest.raises(ConfigError, match="verify"):
        loaderkit.restore("memory://x", verify="yes", **store(a=torch.ones(2)))  # type: ignore[arg-type]


def test_keys_may_come_from_an_iterator() -> None:
    into = {"a": torch.zeros(2), "b": torch.zeros(2)}
    loaderkit.restore("memory://x", into, keys=(key for key in ("a", "b")), **store(a=torch.ones(2), b=torch.ones(2)))
    assert all(tensor.eq(1).all() for tensor in into.values())
    assert set(loaderkit.restore("memory://x", keys=iter("b"), **store(a=torch.ones(2), b=torch.ones(2)))) == {"b"}
    with pytest.raises(ConfigError, match="keys is empty"):
        loaderkit.restore("memory://x", keys=iter(()), **store(a=torch.ones(2)))


def test_tied_weights_need_to_be_saved_only_once(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.zeros(2)
    loaderkit.restore("memory://x", {"embed": weight, "head": weight}, **store(embed=torch.ones(2)))
    assert weight.tolist() == [1, 1]
    # Saved twice, the last one counts, as with load_state_dict, and that is said.
    caplog.clear()
    loaderkit.restore("memory://x", {"a": weight, "b": weight}, **store(a=torch.ones(2), b=torch.full((2,), 2.0)))
    assert weight.tolist() == [2, 2]
    assert "'b' is the same memory as 'a', and they are two tensors in the checkpoint" in caplog.text


def test_an_average_that_is_the_weights_themselves_is_refused(tmp_path: Path, rng: random.Random) -> None:
    """Where it was none when a CheckpointManager saved it: filling it would give the model the average."""
    weight, average = (torch.tensor([rng.random() for _ in range(3)]) for _ in range(2))
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": {"w": weight, "tied": weight}, "average": {"w": average}})
    here, other = torch.zeros(3), torch.zeros(3)
    model = {"w": here, "tied": here}
    with pytest.raises(CheckpointError, match=r"'average\.w' is the same memory as 'model\.\w+', and they are two"):
        loaderkit.restore(tmp_path / "step-0000000001", {"model": model, "average": {"w": here}}, strict=False)
    assert not here.any()
    loaderkit.restore(tmp_path / "step-0000000001", {"model": model, "average": {"w": other}}, strict=False)
    assert torch.equal(here, weight)
    assert torch.equal(other, average)


def test_memory_shared_in_part_is_refused_and_interleaved_memory_is_not() -> None:
    room = torch.zeros(6)
    with pytest.raises(CheckpointError, match="'a' and 'b' share a part of their memory"):
        loaderkit.restore("memory://x", {"a": room[:4], "b": room[2:]}, **store(a=torch.ones(4), b=torch.ones(4)))
    assert not room.any()
    loaderkit.restore(
        "memory://x", {"a": room[::2], "b": room[1::2]}, **store(a=torch.ones(3), b=torch.full((3,), 2.0))
    )
    assert room.tolist() == [1, 2, 1, 2, 1, 2]


def test_autograd_sees_that_a_tensor_has_changed() -> None:
    weight = torch.zeros(2, requires_grad=True)
    loss = (weight * weight).sum()
    loaderkit.restore("memory://x", {"a": weight}, **store(a=torch.ones(2)))
    assert weight.tolist() == [1, 1]
    assert weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["bfloat16", "bf16", torch.float16, "fp8"])
def test_casts_floating_point_tensors_alone(name: Any) -> None:
    source = {"a": torch.randn(100, 7), "n": torch.arange(5)}
    wanted = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}.get(name, torch.float16)
    for data in (safetensors.torch.save(source), saved(source)):
        restored = loaderkit.restore("memory://x", dtype=name, connectors={"memory": MemoryConnector({"x": data})})
        assert restored["a"].dtype == wanted
        assert torch.equal(restored["a"].float(), source["a"].to(wanted).float())
        assert torch.equal(restored["n"], source["n"])


class Failing(MemoryConnector):
    """Fails, or is interrupted, once `num_good` reads have succeeded."""

    def __init__(self, objects: Mapping[str, bytes], num_good: int, error: BaseException) -> None:
        super().__init__(objects)
        self.left = num_good
        self.error = error

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        if self.left == 0 and len(buffer) > 1000:
            raise self.error
        super().read_into(key, start, buffer, etag=etag)
        self.left -= len(buffer) > 1000


@pytest.fixture
def many() -> Iterator[dict[str, torch.Tensor]]:
    before = threading.active_count()
    yield {f"t{n:02}": torch.full((3_000_000,), float(n + 1)) for n in range(6)}
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [ConnectorError("the line is cut"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_names_what_was_touched(many: dict[str, torch.Tensor], error: BaseException) -> None:
    connector: Connector = Failing({"x": safetensors.torch.save(many)}, 3, error)
    into = {name: torch.zeros_like(tensor) for name, tensor in many.items()}
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        loaderkit.restore("memory://x", into, concurrency=1, connectors={"memory": connector})
    notes = " ".join(getattr(caught.value, "__notes__", []))
    named = re.findall(r"t\d\d", notes)
    num_more = int("".join(re.findall(r"and (\d+) more", notes)) or 0)
    written = sorted(name for name, tensor in into.items() if tensor.any())
    assert written
    assert len(written) < len(many)  # how many more were begun is a race
    assert {name for name in written if not num_more or name <= named[-1]} <= set(named)
    assert len(named) + num_more >= len(written)
    if isinstance(caught.value, CheckpointError):
        assert "the line is cut" in str(caught.value)
        assert "memory://x" in str(caught.value)
        assert set(written) <= set(caught.value.touched)
        assert named == list(caught.value.touched[:5])
        assert num_more == max(len(caught.value.touched) - 5, 0)


def test_an_object_replaced_meanwhile_is_an_error(many: dict[str, torch.Tensor]) -> None:
    class Replaced(MemoryConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            if len(buffer) > 1_000_000 and start > 10_000_000:
                self.put(key, b"other")
            super().read_into(key, start, buffer, etag=etag)

    connector = Replaced({"x": safetensors.torch.save(many)})
    with pytest.raises(CheckpointError, match="was replaced since it was listed"):
        loaderkit.restore("memory://x", connectors={"memory": connector})


def test_progress_is_told(many: dict[str, torch.Tensor]) -> None:
    told: list[Any] = []
    loaderkit.restore("memory://x", progress=told.append, **store(**many))
    assert [item.num_bytes for item in told] == sorted(item.num_bytes for item in told)
    assert told[-1].num_bytes == told[-1].total_bytes == 6 * 12_000_000
    assert told[-1].slowest_object == "memory://x"
    assert told[-1].fetched_bytes == told[-1].total_bytes


def test_a_bucket_of_small_ranges_is_read_in_few_requests() -> None:
    """A store without `coalesce_gap` is taken for one that answers late: gaps below 1 MiB are read over."""

    class Far:
        def __init__(self, inner: Connector) -> None:
            self.inner = inner
            self.num_reads = 0
            self.list, self.stat, self.describe, self.close = inner.list, inner.stat, inner.describe, inner.close

        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            self.num_reads += 1
            self.inner.read_into(key, start, buffer, etag=etag)

    state = {f"t{n:04}": torch.full((50,), float(n)) for n in range(1000)}
    far = Far(MemoryConnector({"x": safetensors.torch.save(state)}))
    restored = loaderkit.restore("memory://x", keys="t*[05]", connectors={"memory": far})
    assert len(restored) == 200
    assert all(torch.equal(restored[name], state[name]) for name in restored)
    assert far.num_reads < 10


def test_overlaps_itself_where_two_elements_have_one_place(rng: random.Random) -> None:
    memory, num_overlapping = torch.arange(200), 0
    for _ in range(3000):
        num_dims = rng.randrange(4)
        shape, stride = ([rng.randrange(most) for _ in range(num_dims)] for most in (5, 12))
        tensor = memory.as_strided(shape, stride)
        num_overlapping += (overlaps := len({*tensor.flatten().tolist()}) < tensor.numel())
        assert overlaps_itself(tensor) == overlaps
    assert num_overlapping > 100
    assert overlaps_itself(torch.zeros(1).expand(10**12))
    for tensor in (torch.zeros(4, 10)[:, ::3], torch.zeros(2, 3, 4).permute(2, 0, 1), torch.zeros(8, 8)[1::2, 2:5]):
        assert not overlaps_itself(tensor)
