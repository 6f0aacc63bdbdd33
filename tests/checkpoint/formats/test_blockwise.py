"""Quantisation by blocks: against NumPy, element by element, and the bound on its error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.checkpoint import dequantize
from loaderkit.checkpoint.formats.blockwise import BLOCK, absmax_of, dequantized, num_blocks, quantized


@given(st.integers(0, 900), st.integers(0, 99), st.sampled_from([1e-20, 1e-3, 1.0, 1e20]))
def test_against_numpy(count: int, seed: int, scale: float) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
    absmax = absmax_of(values)
    codes = quantized(values, absmax)
    found = dequantized(codes, absmax)
    assert (codes.dtype, codes.shape, absmax.shape) == (torch.int8, (count,), (num_blocks(count),))
    for number in range(num_blocks(count)):
        block = values[number * BLOCK : (number + 1) * BLOCK].numpy()
        largest = np.abs(block).max()
        assert absmax[number] == largest
        wanted = np.round(block / largest * np.float32(127)) if largest else np.zeros_like(block)
        assert np.array_equal(codes[number * BLOCK : (number + 1) * BLOCK].numpy(), wanted)
        differences = np.abs(found[number * BLOCK : (number + 1) * BLOCK].numpy() - block)
        assert (differences <= largest / 254 * 1.001).all()


def test_a_large_element_spoils_its_own_block_only() -> None:
    values = torch.full((3 * BLOCK,), 0.01)
    values[BLOCK] = 1000.0
    absmax = absmax_of(values)
    found = dequantized(quantized(values, absmax), absmax)
    assert torch.allclose(found[:BLOCK], values[:BLOCK])
    assert torch.allclose(found[2 * BLOCK :], values[2 * BLOCK :])
    assert found[BLOCK + 1] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    absmax = absmax_of(values)
    found = dequantized(quantized(values, absmax), absmax)
    assert not found[:BLOCK].isfinite().any()
    assert found[BLOCK:].eq(1).all()


def test_tensors_by_name() -> None:
    values = torch.linspace(-1, 1, 600).reshape(20, 30)
    absmax = absmax_of(values.flatten())
    codes = quantized(values.flatten(), absmax).view(20, 30)
    other = torch.arange(3)
    found = dequantize({"a": codes, "a.absmax": absmax, "b": other, "c.absmax": other})
    assert found.keys() == {"a", "b", "c.absmax"}
    assert found["a"].shape == (20, 30)
    assert torch.allclose(found["a"], values, atol=1 / 254 * 1.01)
    assert found["b"] is other
