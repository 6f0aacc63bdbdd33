"""Plain values as JSON: the same value comes back, what cannot be held is refused by name, and damage is a FormatError."""

from __future__ import annotations

import datetime
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import same, tensors
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.checkpoint.formats.plain_json import decode, encode
from loaderkit.errors import ConfigError, FormatError

KINDS = [
    "int", "float", "complex", "bytes", "bytearray", "tuple", "size", "set", "frozenset", "dict", "ordered", "array",
    "tensor", "x",
]  # fmt: skip
SIMPLE = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
    | st.binary().map(bytearray) | st.integers(-(2**200), 2**200)
)  # fmt: skip
HASHABLE = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SIMPLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.dictionaries(st.text() | st.just("$tuple"), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict)
        | st.frozensets(HASHABLE, max_size=4)
        | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=15,
)


def through(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode("v", value), allow_nan=False)))


def equal(one: Any, other: Any) -> bool:
    """Of the same types all through, NaN equal to NaN, -0.0 not to 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*map(repr, one)] == [*map(repr, other)] and all(map(equal, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    return bool(one == other)


@given(VALUES)
def test_the_same_value_comes_back(value: Any) -> None:
    assert equal(through(value), value)


@given(tensors())
def test_tensors_inside_a_value(tensor: torch.Tensor) -> None:
    assert same(through((tensor,))[0], tensor)


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">i4", "<u8", "<f2", ">f8", "<c8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_arrays(dtype: str, shape: tuple[int, ...], rng: random.Random) -> None:
    count = math.prod(shape) * np.dtype(dtype).itemsize
    array = np.frombuffer(bytes(rng.randrange(2) for _ in range(count)), dtype).reshape(shape)
    for value in (array, array.T, np.asfortranarray(array)):
        found = through(value)
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_numbers_of_numpy_and_sizes() -> None:
    found = through([np.float32(0.1), np.int64(-3), torch.Size([2, 3])])
    assert [*map(type, found)] == [np.float32, np.int64, torch.Size]
    assert found == [np.float32(0.1), -3, torch.Size([2, 3])]


def test_other_tables_come_back_as_dicts() -> None:
    """As from a pickle that the restricted reader reads."""
    assert equal(through([Counter("aab"), defaultdict(list, a=[1])]), [{"a": 2, "b": 1}, {"a": [1]}])


@pytest.mark.parametrize(
    "value",
    [
        object(), datetime.timedelta(1), torch.float32, torch.device("cpu"), np.array([object()]), np.datetime64("2020"),
        torch.zeros(2, dtype=torch.complex128), type, random.Random(1), torch.nn.Parameter(torch.zeros(1)),
    ],
)  # fmt: skip
def test_what_json_cannot_hold_is_named(value: Any) -> None:
    kind = type(value).__qualname__
    with pytest.raises(ConfigError, match=rf"'a\.b\.1' is a .*{kind}.*use format dcp"):
        encode("a", {"b": [1, value]})


def test_endless_nesting_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="levels deep"):
        encode("a", value)
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(FormatError, match="levels deep"):
        decode(deep)


@given(
    st.recursive(
        st.none() | st.integers(-5, 5) | st.text(max_size=8) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.sampled_from(KINDS).flatmap(lambda kind: inner.map(lambda value: {f"${kind}": value}))
        ),
        max_leaves=8,
    )
)
def test_damaged_values_are_format_errors(value: Any) -> None:
    try:
        decode(value)
    except FormatError:
        return
