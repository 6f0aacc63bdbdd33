from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from typing import Any
from unittest import mock

import kernel_twins
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from loaderkit import native
from loaderkit._internal.splitmix import mix
from loaderkit.sampling.random import Bijection, generator, key_of, uniforms
from loaderkit.sampling.schedule import BlockOrder, GlobalOrder

KEYS = st.integers(0, 2**64 - 1)
MASK = 2**64 - 1


def standard_deviations(counts: NDArray[np.int64], expected: float) -> float:
    """How far a chi-square statistic lies above its mean, in its standard deviations; expected the same everywhere."""
    statistic = float(((counts - expected) ** 2).sum() / expected)
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


# ----------------------------------------------------------------------------------------------------- frozen vectors
# Changing any of these numbers breaks every saved state and the augmentation of every sample.


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ((), 5380877242941954242),
        ((0,), 7629766532325542539),
        (("global", 0, 0), 5140020618244301188),
        (("stage", 7, 3, "random_crop"), 17873909278566791324),
        ((-1, 2**70), 12395124989567100602),
        (("é", ""), 3316274970869038320),
        (("replace", 0, 0), 10710246890979517734),
    ],
)
def test_frozen_keys(parts: tuple[int | str, ...], key: int) -> None:
    assert key_of(*parts) == key


def test_frozen_mix() -> None:
    values = np.array([0, 1, 2, 2**63, 2**64 - 1], np.uint64)
    assert mix(values).tolist() == [
        0,
        6238072747940578789,
        15839785061582574730,
        2720858781877447050,
        13029008266876403067,
    ]


def test_frozen_uniforms() -> None:
    assert uniforms(123456789012345678, np.array([0, 1, 10**12]), 3).tolist() == [
        [0.08988960373594224, 0.012267179813948648, 0.9415793908895892],
        [0.3289116624882984, 0.22601297008444843, 0.619145307467275],
        [0.2828391998778538, 0.3237321223458163, 0.9929862739130517],
    ]


@pytest.mark.parametrize(
    ("size", "key", "images"),
    [
        (1, 5, [0]),
        (2, 5, [0, 1]),
        (10, 0, [8, 0, 2, 4, 3, 7, 1, 9, 5, 6]),
        (10, 2**64 - 1, [5, 0, 4, 9, 3, 8, 7, 1, 2, 6]),
        (13, 42, [1, 6, 11, 10, 0, 8, 2, 3, 4, 9, 5, 12, 7]),
    ],
)
def test_frozen_permutations(size: int, key: int, images: list[int]) -> None:
    assert Bijection(size, key)(np.arange(size)).tolist() == images


def test_frozen_large_permutations() -> None:
    places = np.array([0, 1, 2, 10**9 - 1])
    assert Bijection(10**9, 42)(places).tolist() == [725027642, 403400738, 677956240, 227712740]
    places = np.array([0, 1, 2, 2**60 - 1])
    assert Bijection(2**60, 42)(places).tolist() == [
        91514469022494776,
        103573978155349281,
        115270385794353504,
        632364316407896383,
    ]


def test_frozen_global_order() -> None:
    places = np.arange(12)
    assert GlobalOrder(12, 0).indices(0, places).tolist() == [8, 10, 3, 1, 9, 0, 11, 5, 2, 6, 4, 7]
    assert GlobalOrder(12, 0).indices(1, places).tolist() == [5, 6, 10, 11, 3, 4, 0, 8, 7, 9, 2, 1]
    assert GlobalOrder(12, 1).indices(0, places).tolist() == [5, 3, 8, 10, 1, 4, 0, 7, 9, 6, 11, 2]


def test_frozen_block_order() -> None:
    bounds = np.array([0, 4, 7, 12, 13, 18, 20])
    places = np.arange(20)
    two_lanes = BlockOrder(bounds, 0, window=2, lanes=2)
    assert two_lanes.indices(0, places).tolist() == [
        7, 12, 8, 4, 10, 6, 9, 5, 18, 3, 19, 1, 11, 0, 17, 2, 13, 15, 14, 16
    ]  # fmt: skip
    assert two_lanes.indices(1, places).tolist() == [
        9, 12, 7, 19, 1, 18, 2, 13, 10, 14, 8, 16, 0, 15, 11, 17, 3, 5, 6, 4
    ]  # fmt: skip
    assert BlockOrder(bounds, 5, window=1, lanes=3).indices(0, places).tolist() == [
        5, 8, 18, 6, 7, 19, 4, 11, 13, 12, 9, 16, 2, 10, 17, 0, 1, 14, 15, 3
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "index", "numbers"),
    [
        (5, 7, [1652957133785724753, 6653609507115947714, 7933723508164646041, 958584896736012630]),
        (0xF123456789ABCDEF, 7, [3415119062272089307, 2274200785250215169, 497901883932201313, 1276143238762205643]),
    ],
)
def test_frozen_generator(key: int, index: int, numbers: list[int]) -> None:
    assert generator(key, index).integers(0, 2**63, 4).tolist() == numbers


# ------------------------------------------------------------------------------------------------------ keys and mix


@given(st.lists(st.integers() | st.text(alphabet=st.characters(codec="utf-8")), max_size=4))
def test_keys_are_64_bits_and_tell_parts_apart(parts: list[int | str]) -> None:
    key = key_of(*parts)
    assert 0 <= key <= MASK
    assert key == key_of(*parts)
    assert key != key_of(*parts, 0)
    assert key_of("a", "b") != key_of("ab")
    assert key_of(1) != key_of("1")


def splitmix_finaliser(value: int) -> int:
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & MASK
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


@given(st.lists(KEYS, min_size=1, max_size=20))
def test_mix_is_the_finaliser_of_splitmix64(values: list[int]) -> None:
    assert mix(np.array(values, np.uint64)).tolist() == [splitmix_finaliser(value) for value in values]


# -------------------------------------------------------------------------------------------------------- bijections


@given(st.integers(1, 5000), KEYS)
@example(1, 0)
@example(2, MASK)
@example(4900, 0)
@example(4901, 0)
@example(4999, MASK)
def test_a_bijection_is_a_permutation(size: int, key: int) -> None:
    images = Bijection(size, key)(np.arange(size))
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(size))


def test_every_small_size_is_a_permutation() -> None:
    for size in range(1, 400):
        assert np.array_equal(np.sort(Bijection(size, key_of("size", size))(np.arange(size))), np.arange(size))


@given(st.lists(st.tuples(st.integers(1, 300), KEYS), min_size=1, max_size=30))
def test_every_position_may_have_a_permutation_of_its_own(groups: list[tuple[int, int]]) -> None:
    sizes = np.concatenate([np.full(size, size, np.int64) for size, _ in groups])
    keys = np.concatenate([np.full(size, key, np.uint64) for size, key in groups])
    places = np.concatenate([np.arange(size) for size, _ in groups])
    expected = np.concatenate([Bijection(size, key)(np.arange(size)) for size, key in groups])
    assert np.array_equal(Bijection(sizes, keys)(places), expected)
    # Any order and company of positions gives the same images, also one by one.
    backwards = Bijection(sizes[::-1].copy(), keys[::-1].copy())(places[::-1].copy())
    assert np.array_equal(backwards[::-1], expected)


@given(st.integers(1, 200), st.lists(KEYS, min_size=1, max_size=50))
def test_one_size_with_many_keys(size: int, keys: list[int]) -> None:
    images = Bijection(size, np.array(keys, np.uint64))(np.full(len(keys), size - 1))
    assert images.tolist() == [int(Bijection(size, key)(np.array([size - 1]))[0]) for key in keys]


@given(KEYS, st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(0, 30), st.booleans())
def test_numbers_depend_on_key_and_index_alone(key: int, indices: list[int], num_draws: int, are_apart: bool) -> None:
    given = np.array(indices * (2 if are_apart else 1), np.int64)[:: 2 if are_apart else 1]
    numbers = uniforms(key, given, num_draws)
    assert numbers.shape == (len(given), num_draws)
    for index, row in zip(given, numbers, strict=True):
        assert np.array_equal(uniforms(key, np.array([index]), num_draws)[0], row)


@given(
    st.lists(st.integers(1, 1 << 60) | st.integers(1, 40), min_size=1, max_size=30),
    st.lists(KEYS, min_size=30, max_size=30),
    st.sampled_from(["one for all", "sizes", "keys", "both"]),
    st.data(),
)
def test_c_and_numpy_agree(sizes: list[int], keys: list[int], own: str, data: st.DataObject) -> None:
    num = len(sizes)
    size: Any = np.array(sizes, np.int64) if own in ("sizes", "both") else sizes[0]
    key: Any = np.array(keys[:num], np.uint64) if own in ("keys", "both") else keys[0]
    places = np.array(
        [data.draw(st.integers(0, one - 1)) for one in (sizes if np.ndim(size) else [size] * num)], np.int64
    )
    compiled = Bijection(size, key)(places)
    with mock.patch.object(native, "permute", kernel_twins.permute):
        assert np.array_equal(Bijection(size, key)(places), compiled)


def test_no_positions_have_no_images() -> None:
    nothing = np.empty(0, np.int64)
    assert Bijection(nothing, np.empty(0, np.uint64))(nothing).shape == (0,)


@given(st.integers(1, 1 << 60), KEYS, st.data())
def test_any_size_stays_in_range_and_injective(size: int, key: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=50))
    places = np.array(chosen, np.int64)
    images = Bijection(size, key)(places)
    assert np.all((images >= 0) & (images < size))
    assert len(set(images.tolist())) == len(chosen)
    assert places.tolist() == chosen  # the positions given are not written over
    assert [int(Bijection(size, key)(place.reshape(1))[0]) for place in places] == images.tolist()


def test_shapes_and_impossible_sizes() -> None:
    permutation = Bijection(24, 3)
    assert np.array_equal(permutation(np.arange(24).reshape(2, 3, 4)), permutation(np.arange(24)).reshape(2, 3, 4))
    assert permutation(np.empty(0, np.int64)).shape == (0,)
    with pytest.raises(ValueError, match="at least one"):
        Bijection(0, 1)
    with pytest.raises(ValueError, match="at least one"):
        Bijection(np.array([3, 0]), 1)
    with pytest.raises(ValueError, match="2\\*\\*60"):
        Bijection(2**60 + 1, 1)


def test_keys_and_epochs_give_different_permutations() -> None:
    places = np.arange(1000)
    seen = {Bijection(1000, key)(places).tobytes() for key in range(200)}
    assert len(seen) == 200
    epochs = {GlobalOrder(1000, seed).indices(epoch, places).tobytes() for seed in range(10) for epoch in range(10)}
    assert len(epochs) == 100
    # A permutation of 1000 leaves one element in its place on average; two unrelated ones agree as rarely.
    first, second = (GlobalOrder(1000, 0).indices(epoch, places) for epoch in (0, 1))
    assert np.count_nonzero(first == second) < 10


@pytest.mark.parametrize("size", [16, 33, 100])
def test_every_value_is_as_likely_at_every_position(size: int) -> None:
    num_keys = 20_000
    counts = np.zeros((size, size), np.int64)
    keys = np.array([key_of("chi", number) for number in range(num_keys)], np.uint64)
    for position in range(size):
        images = Bijection(size, keys)(np.full(num_keys, position))
        counts[position] = np.bincount(images, minlength=size)
    # Rows and columns sum to num_keys, so there are (size - 1)^2 degrees of freedom.
    statistic = float(((counts - num_keys / size) ** 2).sum() / (num_keys / size))
    freedom = (size - 1) ** 2
    assert abs(statistic - freedom) / math.sqrt(2 * freedom) < 4


def count_permutations(size: int, num_keys: int) -> NDArray[np.int64]:
    keys = np.repeat(np.array([key_of("all", number) for number in range(num_keys)], np.uint64), size)
    images = Bijection(size, keys)(np.tile(np.arange(size), num_keys)).reshape(num_keys, size)
    found = Counter(map(tuple, images.tolist()))
    return np.array([found[order] for order in itertools.permutations(range(size))])


@pytest.mark.parametrize("size", [3, 4, 5])
def test_every_permutation_of_a_few_is_as_likely(size: int) -> None:
    num_keys = 20_000
    counts = count_permutations(size, num_keys)
    assert counts.sum() == num_keys
    assert standard_deviations(counts, num_keys / counts.size) < 4


@pytest.mark.prove
@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_every_permutation_of_a_few_is_as_likely_over_many_keys(size: int) -> None:
    num_keys = 200_000
    counts = count_permutations(size, num_keys)
    assert standard_deviations(counts, num_keys / counts.size) < 4


def test_neighbours_are_not_kept_together() -> None:
    size = 10_000
    gaps = np.diff(GlobalOrder(size, 0).indices(0, np.arange(size)))
    # P(|gap| <= d) is about 2 d / size.
    assert np.count_nonzero(np.abs(gaps) <= 50) == pytest.approx(100, abs=50)
    tenths = np.bincount((gaps % size) * 10 // size, minlength=10)
    assert standard_deviations(tenths, len(gaps) / 10) < 4


def test_a_thousand_million_samples_cost_no_memory() -> None:
    size = 10**9
    order = GlobalOrder(size, 1)
    places = np.unique(np.random.default_rng(0).integers(0, size, 200_000))
    order.indices(0, places[:100])
    tracemalloc.start()
    images = order.indices(0, places)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 20 * places.nbytes
    assert np.all((images >= 0) & (images < size))
    assert len(np.unique(images)) == len(places)
    thousandths = np.bincount(images // (size // 1000), minlength=1000)
    assert standard_deviations(thousandths, len(images) / 1000) < 4
    tracemalloc.start()
    order.indices(1, np.array([0, size - 1]))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


@pytest.mark.prove
def test_a_million_neighbouring_positions_of_a_thousand_million_are_injective() -> None:
    images = GlobalOrder(10**9, 7).indices(3, np.arange(500_000_000, 502_000_000))
    assert len(np.unique(images)) == len(images)
    assert np.all((images >= 0) & (images < 10**9))


# ---------------------------------------------------------------------------------------------------------- uniforms


@given(KEYS, st.lists(st.integers(0, 2**62), max_size=30), st.integers(1, 30), st.data())
def test_uniforms_depend_on_key_and_index_alone(
    key: int, indices: list[int], num_draws: int, data: st.DataObject
) -> None:
    whole = uniforms(key, np.array(indices, np.int64), num_draws)
    assert whole.shape == (len(indices), num_draws)
    assert whole.dtype == np.float64
    assert np.all((whole >= 0) & (whole < 1))
    cut = data.draw(st.integers(0, len(indices)))
    parts = [uniforms(key, np.array(part, np.int64), num_draws) for part in (indices[:cut], indices[cut:])]
    assert np.array_equal(np.concatenate(parts), whole)
    # More draws leave the first ones as they were.
    assert np.array_equal(uniforms(key, np.array(indices, np.int64), num_draws + 5)[:, :num_draws], whole)


def reference_uniform(key: int, index: int, draw: int) -> float:
    golden = 0x9E3779B97F4A7C15
    seed = splitmix_finaliser((index * golden + key) & MASK)
    return (splitmix_finaliser((seed + (draw + 1) * golden) & MASK) >> 11) / 2**53


@given(KEYS, st.integers(0, 2**62), st.integers(0, 20))
def test_uniforms_are_splitmix64(key: int, index: int, draw: int) -> None:
    assert uniforms(key, np.array([index]), draw + 1)[0, draw] == reference_uniform(key, index, draw)


@pytest.mark.parametrize("num_cells", [10, 256])
def test_uniforms_are_uniform(num_cells: int) -> None:
    numbers = uniforms(key_of("uniform"), np.arange(50_000), 4)
    for column in (*numbers.T, *numbers[:1000].reshape(-1, 1000)):
        counts = np.bincount((column * num_cells).astype(np.int64), minlength=num_cells)
        assert standard_deviations(counts, len(column) / num_cells) < 4.5


def test_draws_of_a_sample_and_of_neighbours_are_independent() -> None:
    numbers = uniforms(key_of("pairs"), np.arange(100_000), 3)
    others = uniforms(key_of("other"), np.arange(100_000), 3)
    pairs = [
        (numbers[:, 0], numbers[:, 1]),
        (numbers[:, 1], numbers[:, 2]),
        (numbers[:-1, 0], numbers[1:, 0]),
        (numbers[:-1, 1], numbers[1:, 0]),
        (numbers[:, 0], others[:, 0]),
    ]
    for first, second in pairs:
        cells = (first * 20).astype(np.int64) * 20 + (second * 20).astype(np.int64)
        assert standard_deviations(np.bincount(cells, minlength=400), len(first) / 400) < 4


# -------------------------------------------------------------------------------------------------------- generators


@given(KEYS, st.integers(0, 2**62))
def test_a_generator_repeats_itself(key: int, index: int) -> None:
    first, second = generator(key, index), generator(key, index)
    assert first.integers(0, 2**60, 5).tolist() == second.integers(0, 2**60, 5).tolist()
    assert first.random() == second.random()


@given(KEYS, st.integers(0, 2**62))
@example(MASK, 0)
@example(2**63 + 1, 3)
def test_a_generator_is_philox_with_key_and_index(key: int, index: int) -> None:
    # One integer of 128 bits, so that no bit of a key at or above 2**63 can be lost on the way through a float.
    expected = np.random.Generator(np.random.Philox(key=key | index << 64))
    assert generator(key, index).integers(0, 2**63, 4).tolist() == expected.integers(0, 2**63, 4).tolist()


def test_generators_have_streams_of_their_own() -> None:
    streams = {
        generator(key, index).integers(0, 2**62, 4).tobytes()
        for key in (0, 1, 2**63, MASK)
        for index in (*range(100), 2**40)
    }
    assert len(streams) == 4 * 101
    numbers = np.concatenate([generator(9, index).random(10) for index in range(2000)])
    assert standard_deviations(np.bincount((numbers * 50).astype(np.int64), minlength=50), len(numbers) / 50) < 4
