"""What is packed comes out of the other end as it went in: tensors of every dtype that torch has, empty ones among them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from loaderkit._internal.packing import pack, unpack

PLAIN = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
# What came to torch after its typed storages.
UNTYPED = [
    torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


class Mask(torch.Tensor):
    """As torchvision's."""


def drawn(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """Random bits of a random shape, perhaps of no element, or a view of more."""
    shape = [rng.choice([0, 1, 2, 3, 40]) for _ in range(rng.randint(0, 3))]
    num = 1
    for length in shape:
        num *= length
    bits = torch.frombuffer(bytearray(rng.randbytes((num + 9) * dtype.itemsize)), dtype=torch.uint8)
    bits = bits & 1 if dtype is torch.bool else bits
    return bits.view(dtype)[5 : 5 + num].reshape(shape)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.permute([*reversed(range(tensor.ndim))]),
    "of a subclass": lambda tensor: tensor.as_subclass(Mask),
    "of autograd": lambda tensor: tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex()),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "conjugate": torch.conj,
}


@pytest.mark.parametrize("kind", MADE)
def test_every_dtype(rng: random.Random, kind: str) -> None:
    for dtype in [*PLAIN, *UNTYPED]:
        given = [MADE[kind](drawn(rng, dtype)) for _ in range(4)]
        given.append(MADE[kind](torch.empty((3, 0), dtype=dtype)))
        for found, one in zip(unpack(*pack(given)), given, strict=True):
            assert type(found) is type(one)
            assert (found.dtype, found.shape, found.stride()) == (one.dtype, one.shape, one.stride())
            assert (found.requires_grad, found.is_conj()) == (one.requires_grad, one.is_conj())
            assert torch.equal(bits_of(found), bits_of(one)), (dtype, one.shape)


def test_empty_tensors_share_nothing(rng: random.Random) -> None:
    given = [torch.empty(0, dtype=rng.choice(UNTYPED)) for _ in range(2)]
    first, second = unpack(*pack(given))
    first.resize_(3)
    second.resize_(5)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
