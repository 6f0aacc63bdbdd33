from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from num_examples import num_examples
from torch.utils.data import default_collate

import loaderkit
from loaderkit.errors import ConfigError, StageError
from loaderkit.samples.values import Encoded, Image
from loaderkit.stages.layout import specs_of
from loaderkit.stages.values import as_tensor


class Items:
    """The simplest data set object: a list of samples."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def batches(items: list[dict[str, Any]], size: int | None = None, **options: Any) -> list[dict[str, Any]]:
    pipeline = (
        loaderkit.Pipeline.dataset(Items(items))
        .shuffle("none")
        .read()
        .batch(size or len(items), **options)
        .prefetch(executor="inline")
    )
    with loaderkit.build(pipeline) as loader:
        return list(loader)


def batch_of(items: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    (batch,) = batches(items, **options)
    return batch


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


# ------------------------------------------------------------------------------------------------- as default_collate

VALUES: dict[str, list[Any]] = {
    "int": [1, -5, 2**62],
    "float": [0.1, -1e300, float("inf")],
    "bool": [True, False, True],
    "numpy float32": [np.float32(0.1), np.float32(2), np.float32(-3)],
    "numpy float16": [np.float16(0.1), np.float16(2), np.float16(-3)],
    "numpy int8": [np.int8(1), np.int8(-2), np.int8(3)],
    "numpy bool": [np.bool_(True), np.bool_(False), np.bool_(True)],
    "array of 0 dimensions": [np.array(1.5), np.array(2.5), np.array(3.5)],
    "array": [np.full((2, 3), i, np.float32) for i in range(3)],
    "array uint16": [np.full(2, i, np.uint16) for i in range(3)],
    "empty array": [np.empty((0, 3), np.int32) for _ in range(3)],
    "tensor": [torch.full((2, 1), i, dtype=torch.int16) for i in range(3)],
    "tensor bfloat16": [torch.full((4,), i, dtype=torch.bfloat16) for i in range(3)],
    "tensor bool": [torch.tensor([True, False]) for _ in range(3)],
    "tensor complex": [torch.tensor([1 + 2j]) for _ in range(3)],
    "scalar tensor": [torch.tensor(i) for i in range(3)],
    "strided tensor": [torch.arange(12).reshape(3, 4).t()[::2] + i for i in range(3)],
    "tensor uint8 like an image": [torch.full((3, 4, 5), i, dtype=torch.uint8) for i in range(3)],
}


@pytest.mark.parametrize("name", VALUES)
def test_tensors_are_those_of_default_collate(name: str) -> None:
    expected = default_collate(VALUES[name])
    found = batch_of([{"x": value} for value in VALUES[name]])["x"]
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert bytes_of(found) == bytes_of(expected)


@given(
    st.integers(1, 5),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    st.sampled_from(["u1", "i2", "i4", "i8", "f2", "f4", "f8", "?", "c8"]),
    st.integers(0, 100),
)
@settings(max_examples=num_examples(40))
def test_any_array_arrives_unchanged(num: int, shape: tuple[int, ...], dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [np.array(rng.integers(0, 2, shape)).astype(dtype) for _ in range(num)]
    found = batch_of([{"x": array} for array in arrays])["x"]
    expected = torch.stack([torch.from_numpy(array) for array in arrays])
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_arrays_of_foreign_byte_order_and_strides() -> None:
    for array in (
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6.0)[::-1],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ):
        found = batch_of([{"x": array}, {"x": array + 1}])["x"]
        assert found.tolist() == [array.tolist(), (array + 1).tolist()]
    locked = np.arange(3)
    locked.flags.writeable = False
    assert batch_of([{"x": locked}])["x"].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "values",
    [
        ["a", "", "ü"],
        [b"a", b"", b"\0"],
        [{"a": 1}, {}, {"b": [2]}],
        [[1], [2, 3], []],
        [None, None, None],
        [(1, 2), (3,), ()],
    ],
)
def test_everything_else_becomes_a_list(values: list[Any]) -> None:
    batch = batch_of([{"x": value, "n": 0} for value in values])
    assert batch["x"] == values
    assert batch["__key__"] == ["0", "1", "2"]


def test_lists_hold_memory_of_their_own() -> None:
    """Bytes that were read are a view of a buffer that the next chunk overwrites."""
    memory = {"memory": loaderkit_memory({f"{i:03}.bin": bytes([i]) * 50 for i in range(40)})}
    pipeline = (
        loaderkit.Pipeline.files("memory://").shuffle("none").read().batch(4).prefetch(executor="inline", concurrency=1)
    )
    with loaderkit.build(pipeline, connectors=memory) as loader:
        found = [value for batch in loader for value in batch["bin"]]
    assert found == [bytes([i]) * 50 for i in range(40)]
    assert all(type(value) is bytes for value in found)


def take_view(sample: dict[str, Any]) -> dict[str, Any]:
    value = sample["bin"]
    return {"view": value.data if isinstance(value, Encoded) else memoryview(value)}


def test_views_that_a_call_returns_are_not_overwritten() -> None:
    memory = {"memory": loaderkit_memory({f"{i:03}.bin": bytes([i]) * 50 for i in range(40)})}
    pipeline = (
        loaderkit.Pipeline.files("memory://")
        .shuffle("none")
        .read()
        .call(take_view)
        .batch(4)
        .prefetch(executor="inline", concurrency=1)
    )
    with loaderkit.build(pipeline, connectors=memory) as loader:
        found = [bytes(value) for batch in list(loader) for value in batch["view"]]
    assert found == [bytes([i]) * 50 for i in range(40)]


def loaderkit_memory(objects: Mapping[str, bytes]) -> Any:
    from loaderkit.connectors.memory import MemoryConnector

    return MemoryConnector(objects)


def test_images_are_planes_and_masks_one_channel() -> None:
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    specs = specs_of([("k", {"image": Image(pixels), "mask": Image(pixels[:, :, :1], mask=True)})], {})
    assert specs["image"].shape == (3, 4, 5)
    assert specs["image"].dtype == "uint8"
    assert specs["image"].image
    assert specs["mask"].shape == (1, 4, 5)
    assert not specs["mask"].image
    normalised = specs_of([("k", {"image": Image(pixels), "mask": Image(pixels[:, :, :1], mask=True)})], {}, "float32")
    assert normalised["image"].dtype == "float32"
    assert normalised["mask"].dtype == "uint8"
    assert torch.equal(as_tensor(Image(pixels)), torch.from_numpy(pixels.transpose(2, 0, 1).copy()))


# ------------------------------------------------------------------------------------------------------------ ragged

TENSORS = [torch.arange(3), torch.arange(5) + 10, torch.empty(0, dtype=torch.int64)]


def test_ragged_lists() -> None:
    batch = batch_of([{"x": tensor, "n": i} for i, tensor in enumerate(TENSORS)], ragged={"x": "list"})
    assert isinstance(batch["x"], list)
    assert all(torch.equal(found, given) for found, given in zip(batch["x"], TENSORS, strict=True))
    assert all(found.data_ptr() != given.data_ptr() for found, given in zip(batch["x"][:2], TENSORS[:2], strict=True))
    assert "x_sizes" not in batch


def test_ragged_padding() -> None:
    batch = batch_of([{"x": tensor} for tensor in TENSORS], ragged={"x": "pad"}, pad_value=-1)
    assert batch["x"].tolist() == [[0, 1, 2, -1, -1], [10, 11, 12, 13, 14], [-1] * 5]
    assert batch["x_sizes"].tolist() == [3, 5, 0]
    assert batch["x_sizes"].dtype == torch.int64
    assert batch["x"].dtype == torch.int64


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.uint8, -1), (torch.int64, 0.5), (torch.int32, float("nan")), (torch.float16, 1e5)]
)
def test_padding_that_the_type_cannot_hold(dtype: torch.dtype, value: float) -> None:
    """0.5 became 0 in a field of whole numbers, without a word."""
    items = [{"x": torch.ones(num, dtype=dtype)} for num in (2, 3)]
    with pytest.raises(
        ConfigError, match=rf"batch\.pad_value is {value:g}, which 'x' cannot hold: its type is {dtype}"
    ):
        batch_of(items, ragged={"x": "pad"}, pad_value=value)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5), st.integers(-3, 3))
def test_padding_in_two_dimensions(shapes: list[tuple[int, int]], value: int) -> None:
    tensors = [torch.arange(h * w).reshape(h, w).float() + 1 for h, w in shapes]
    batch = batch_of([{"x": tensor} for tensor in tensors], ragged={"x": "pad"}, pad_value=value)
    padded, sizes = batch["x"], batch["x_sizes"]
    assert padded.shape == (len(shapes), max(h for h, _ in shapes), max(w for _, w in shapes))
    assert sizes.tolist() == [list(shape) for shape in shapes]
    for row, (h, w), tensor in zip(padded, shapes, tensors, strict=True):
        assert torch.equal(row[:h, :w], tensor)
        outside = torch.ones_like(row, dtype=torch.bool)
        outside[:h, :w] = False
        assert (row[outside] == value).all()


def test_what_cannot_be_padded_together() -> None:
    for other in (torch.zeros(2, 2, dtype=torch.int64), np.zeros(2, np.float32), 3):
        with pytest.raises(
            StageError, match=r"'1'.*cannot be padded together with int64 \[2\] \(from sample '0'\)"
        ) as caught:
            batch_of([{"x": torch.arange(2)}, {"x": other}], ragged={"x": "pad"})
        assert (caught.value.stage, caught.value.key) == ("batch", "1")


def test_ragged_of_what_is_no_tensor_or_no_field() -> None:
    with pytest.raises(StageError, match=r"'0'.*`ragged` is for tensors and lists of numbers, and str is not a number"):
        batch_of([{"x": "text"}], ragged={"x": "pad"})
    with pytest.raises(StageError, match="cannot hold sample '0'"):
        batch_of([{"x": 2**70}], ragged={"x": "pad"})
    with pytest.raises(StageError, match="a list without items has no type"):
        batch_of([{"x": []}, {"x": []}], ragged={"x": "pad"})
    with pytest.raises(StageError, match=r"'y'.*samples have x"):
        batch_of([{"x": 1}], ragged={"y": "list"})


# ------------------------------------------------------------------------------------------- samples that do not fit


def refusal(items: list[dict[str, Any]]) -> str:
    with pytest.raises(StageError) as caught:
        batch_of(items)
    assert caught.value.stage == "batch"
    assert caught.value.key == "1"
    message = str(caught.value)
    assert "'1'" in message
    assert "'0'" in message, "both samples should be named"
    return message


def test_differing_shapes() -> None:
    message = refusal([{"x": torch.zeros(3, 4)}, {"x": torch.zeros(3, 5)}])
    assert "'x'" in message
    assert "[3, 4]" in message
    assert "[3, 5]" in message
    assert "ragged" in message


def test_differing_dtypes() -> None:
    assert "float64" in refusal([{"x": torch.zeros(3)}, {"x": torch.zeros(3, dtype=torch.float64)}])
    assert "bool" in refusal([{"x": True}, {"x": 1}])
    refusal([{"x": np.int32(1)}, {"x": 1}])


@pytest.mark.parametrize(("dtype", "other"), [*permutations(["float64", "float32", "int64", "uint8", "bool"], 2)])
def test_one_array_of_another_dtype_is_refused(dtype: str, other: str) -> None:
    assert dtype in refusal([{"x": np.zeros(3, other if number == 1 else dtype)} for number in range(4)])


def test_text_where_numbers_were() -> None:
    message = refusal([{"x": 1, "y": 0}, {"x": "one", "y": 0}])
    assert "'x'" in message


def test_none_where_numbers_were() -> None:
    assert "'x'" in refusal([{"x": 1}, {"x": None}])


def test_differing_fields() -> None:
    assert "no 'y'" in refusal([{"x": 1, "y": 2}, {"x": 1}])
    with pytest.raises(StageError, match=r"'0'.* no 'z', unlike sample '1'"):
        batch_of([{"x": 1}, {"x": 1, "z": 2}])


def test_one_bad_sample_among_many_is_named() -> None:
    items = [{"x": torch.zeros(2)} for _ in range(20)]
    items[13] = {"x": torch.zeros(3)}
    with pytest.raises(StageError) as caught:
        batches(items, 5)
    assert caught.value.key == "13"
    assert "'13'" in str(caught.value)


def test_integers_that_are_too_large() -> None:
    with pytest.raises(StageError, match=r"'1'") as caught:
        batch_of([{"x": 1}, {"x": 2**63}, {"x": 3}])
    assert caught.value.key == "1"
    assert batch_of([{"x": 2**63 - 1}, {"x": -(2**63)}])["x"].tolist() == [2**63 - 1, -(2**63)]
    with pytest.raises(StageError):
        batch_of([{"x": 2**70}])


def test_unsigned_integers_of_64_bits_are_numbers() -> None:
    found = batch_of([{"x": np.uint64(2**64 - 1)}, {"x": np.uint64(1)}])["x"]
    assert found.dtype == torch.uint64
    assert found.tolist() == [2**64 - 1, 1]


def test_objects_that_are_no_numbers() -> None:
    for array in (np.array(["a"]), np.array([{}], object), np.array(["2020-01-01"], "M8[D]")):
        try:
            batch = batch_of([{"x": array}])
        except StageError as error:
            assert "'0'" in str(error)  # noqa: PT017 - either outcome is clear
        else:
            assert isinstance(batch["x"], list)


def test_tensors_without_plain_memory_are_refused() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for kind, remedy, value in (
        ("sparse_coo", "to_dense()", torch.eye(2).to_sparse()),
        ("nested", "to_padded_tensor(0)", jagged),
    ):
        for options in ({}, {"ragged": {"x": "pad"}}):
            with pytest.raises(StageError, match=f"'0': it has a tensor that is {kind}.*{re.escape(remedy)}"):
                batch_of([{"x": value}], **options)
    assert batch_of([{"x": jagged}], ragged={"x": "list"})["x"][0].is_nested


def test_gradients_stay_with_the_data_set() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    made: list[list[dict[str, Any]]] = [[{"x": weight * n} for n in range(4)], [{"x": weight}, {"x": torch.zeros(3)}]]
    for items in made:
        found = batch_of(items)["x"]
        assert not found.requires_grad
        assert found.grad_fn is None


def test_names_that_batches_need_are_refused() -> None:
    for name in ("__key__", "__wrapped__"):
        with pytest.raises(StageError, match=name):
            batch_of([{"x": 1, name: "mine"}])


# -------------------------------------------------------------------------------------------------- sizes of batches


@given(st.integers(1, 30), st.integers(1, 12), st.booleans())
@settings(max_examples=num_examples(30))
def test_numbers_of_batches(num: int, size: int, drop_last: bool) -> None:
    items = [{"x": i, "t": str(i)} for i in range(num)]
    if drop_last and num < size:
        with pytest.raises(loaderkit.errors.ConfigError, match="no batch"):
            batches(items, size, drop_last=True)
        return
    found = batches(items, size, drop_last=drop_last)
    kept = num // size * size if drop_last else num
    assert [batch["x"].tolist() for batch in found] == [
        list(range(i, min(i + size, kept))) for i in range(0, kept, size)
    ]
    assert [batch["t"] for batch in found] == [[str(x) for x in batch["x"].tolist()] for batch in found]
    assert all(batch["__key__"] == batch["t"] for batch in found)


def test_batches_are_the_users() -> None:
    """Whatever is kept of a batch stays as it was while later ones are made."""
    items = [{"x": torch.full((100,), i)} for i in range(64)]
    found = batches(items, 2)
    for number, batch in enumerate(found):
        assert batch["x"].tolist() == [[2 * number] * 100, [2 * number + 1] * 100]
        batch["x"].zero_()
