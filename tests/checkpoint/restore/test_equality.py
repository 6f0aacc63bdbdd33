"""What is restored equals, to the last bit, what the formats' own readers give."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_states import (
    DTYPES,
    flat_states,
    pack,
    random_tensor,
    same,
    save_dcp,
    saved,
    tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit.connectors.memory import MemoryConnector

pytestmark = pytest.mark.matrix(4)

warnings.filterwarnings("ignore", module="torch.distributed")
TREES = st.recursive(
    st.integers() | st.text(max_size=4) | st.none() | st.booleans() | st.floats(allow_nan=False) | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def assert_same(restored: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(restored) == set(wanted)
    for name, value in wanted.items():
        assert same(restored[name], value), name


@given(flat_states())
@settings(max_examples=num_examples(60))
def test_safetensors_equals_its_own_reader(state: dict[str, torch.Tensor]) -> None:
    state = {name: tensor.contiguous().clone() for name, tensor in state.items() if name != "__metadata__"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        safetensors.torch.save_file(state, path)
        wanted = safetensors.torch.load_file(path)
        assert_same(loaderkit.restore(path), wanted)
        assert_same(loaderkit.restore(folder), wanted)
        pack([path], path.parent, path.with_suffix(".tar"))
        assert_same(loaderkit.restore(path.with_suffix(".tar")), wanted)
        given = {"memory": MemoryConnector({"a/model": path.read_bytes()})}
        assert_same(loaderkit.restore("memory://a/model", connectors=given), wanted)


@given(flat_states())
@settings(max_examples=num_examples(60))
def test_torch_save_equals_torch_load(state: dict[str, torch.Tensor]) -> None:
    connectors = {"memory": MemoryConnector({"x.pt": saved(state)})}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        path.write_bytes(saved(state))
        wanted = torch.load(path, weights_only=True)
        restored = loaderkit.restore(path)
        assert_same(restored, wanted)
        assert {name: tensor.stride() for name, tensor in restored.items() if tensor.numel()} == {
            name: tensor.stride() for name, tensor in wanted.items() if tensor.numel()
        }
        assert_same(loaderkit.restore("memory://x.pt", connectors=connectors), wanted)
        pack([path], path.parent, Path(folder) / "x.tar")
        assert_same(loaderkit.restore(f"{folder}/x.tar/x.pt"), wanted)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), TREES, max_size=4))
@settings(max_examples=num_examples(60))
def test_nested_states_have_the_names_of_torch(tree: dict[str, Any]) -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    wanted, _ = flatten_state_dict(tree)
    restored = loaderkit.restore("memory://x.pt", connectors={"memory": MemoryConnector({"x.pt": saved(tree)})})
    assert_same(restored, wanted)


@given(flat_states())
@settings(max_examples=15)
@pytest.mark.filterwarnings("ignore")
def test_torch_distributed_checkpoint_equals_its_own_reader(state: dict[str, torch.Tensor]) -> None:
    state = state | {"step": torch.tensor(3)}
    values: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "names": ["a", "b"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-1"
        save_dcp({**state, "other": values}, path)
        wanted = {
            name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in state.items()
        }
        load(wanted, checkpoint_id=path, no_dist=True)
        restored = loaderkit.restore(path)
        assert_same({name: restored.pop(name) for name in wanted}, wanted)
        assert restored == {f"other.{name}": value for name, value in values.items()}
        pack(sorted(path.iterdir()), Path(folder), Path(folder) / "all.tar")
        assert_same(loaderkit.restore(f"{folder}/all.tar", keys=["step"]), {"step": torch.tensor(3)})


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
@settings(max_examples=num_examples(80))
def test_targets_of_any_strides_and_types_are_filled(
    dtype: torch.dtype, shape: list[int], seed: int, random: Any
) -> None:
    source = random_tensor(dtype, tuple(shape), seed)
    floating = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    target_dtype = random.choice(floating) if dtype.is_floating_point else dtype
    order = random.sample(range(len(shape)), len(shape))
    room = torch.full([2 * shape[dim] + 1 for dim in order], 7, dtype=torch.int32).to(target_dtype)
    target = room[tuple(slice(1, None, 2) for _ in order)].permute(*[order.index(dim) for dim in range(len(shape))])
    before = room.clone()
    given = {"memory": MemoryConnector({"x": safetensors.torch.save({"a": source})})}
    loaderkit.restore("memory://x", {"a": target}, dtype="target", connectors=given)
    wanted = source.to(target_dtype)
    # What bits a NaN has in another type depends on how many elements are converted at a time.
    known = ~wanted.isnan() if target_dtype != dtype else torch.ones(shape, dtype=torch.bool)
    assert target.dtype == target_dtype
    assert same(target[known], wanted[known])
    assert bool(target[~known].isnan().all())
    target.copy_(torch.full([], 7, dtype=torch.int32).to(target_dtype))
    assert same(room, before), "bytes beside the target were written"


@given(st.integers(1, 400), st.integers(1, 300), st.integers(0, 3))
@settings(max_examples=num_examples(30))
def test_small_memory_gives_the_same_as_much(rows: int, columns: int, kind: int) -> None:
    whole = random_tensor(torch.int32, (2 * rows, columns), 1)
    tensor = (whole, whole[::2], whole.t(), whole[:, : columns // 2 + 1])[kind]
    data = {"x.pt": saved({"a": tensor, "b": tensor.clone()})}
    for into in (None, {"a": torch.empty_like(tensor), "b": torch.empty_like(tensor).t().contiguous().t()}):
        restored = loaderkit.restore(
            "memory://x.pt", into, memory="512KiB", connectors={"memory": MemoryConnector(data)}
        )
        assert same(restored["a"], tensor)
        assert same(restored["b"], tensor)


def equal_trees(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(equal_trees(one[k], other[k]) for k in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal_trees, one, other))
    return same(one, other)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3) | st.integers(0, 3), TREES, max_size=4))
@settings(max_examples=num_examples(40))
def test_nested_is_what_was_saved(tree: dict[Any, Any]) -> None:
    given = {"memory": MemoryConnector({"x.pt": saved(tree)})}
    assert equal_trees(loaderkit.restore("memory://x.pt", nested=True, connectors=given), tree)


def test_ten_thousand_tiny_tensors(tmp_path: Path) -> None:
    state = {f"layer.{n}": torch.full((n % 7,), n) for n in range(10_000)}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    assert_same(loaderkit.restore(tmp_path), state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert loaderkit.restore(tmp_path, into) is into
    assert_same(into, state)


def test_tied_tensors_share_memory_again_and_are_read_once(tmp_path: Path) -> None:
    weight = torch.randn(64, 32)
    torch.save({"embed": weight, "head": weight, "row": weight[3], "t": weight.t()}, tmp_path / "x.pt")
    restored = loaderkit.restore(tmp_path / "x.pt")
    assert restored["embed"].data_ptr() == restored["head"].data_ptr() == restored["t"].data_ptr()
    restored["embed"][3] = 5
    assert restored["row"].eq(5).all()


def test_views_of_one_storage_as_two_types_are_cast_each(tmp_path: Path) -> None:
    one = torch.arange(40, dtype=torch.uint8).view(torch.float8_e4m3fn)
    state = {"one": one, "two": one.view(torch.float8_e5m2)}
    torch.save(state, tmp_path / "x.pt")
    assert_same(loaderkit.restore(tmp_path / "x.pt"), state)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32):
        cast = {name: tensor.to(dtype) for name, tensor in state.items()}
        assert_same(loaderkit.restore(tmp_path / "x.pt", dtype=dtype), cast)


def test_shards_with_an_index(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "m-1.safetensors")
    safetensors.torch.save_file({"b": torch.zeros(3)}, tmp_path / "m-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'
    )
    assert_same(loaderkit.restore(tmp_path), {"a": torch.ones(2), "b": torch.zeros(3)})
