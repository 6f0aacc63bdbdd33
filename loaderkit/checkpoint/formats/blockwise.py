"""Quantisation to int8 by blocks: 256 elements share a scale, so that one large element spoils only its own block.

Blocks with a scale each, from: T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit Optimizers via Block-wise
Quantization", ICLR 2022, https://arxiv.org/abs/2110.02861. The codes here are linear, where the paper has a table of them:
code = round(127 x / max |x|), so the error of an element is at most max |x| / 254.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

BLOCK = 256
ABSMAX = ".absmax"
"""Ends the name of the tensor with the scales of another: float32 [number of blocks], in the order of its elements."""
_LARGEST = 127


def num_blocks(num_elements: int) -> int:
    """The blocks of a tensor; the last one may be shorter."""
    return -(-num_elements // BLOCK)


def absmax_of(values: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each block of `values` [N], float32 [blocks]. NaN for a block with a NaN."""
    return _in_blocks(values.float()).abs().amax(1)


def quantized(values: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """The codes of `values` [N], int8 [N]; `absmax` are the largest absolute values of its blocks. A block that is not
    finite has codes 0."""
    scaled = _in_blocks(values.float()) / absmax[:, None] * _LARGEST
    codes: torch.Tensor = torch.nan_to_num(scaled, 0.0, 0.0, 0.0).round().to(torch.int8).flatten()[: len(values)]
    return codes


def dequantized(codes: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """What codes int8 of any shape stand for, float32 of that shape: each within absmax / 254 of what it was."""
    blocks = _in_blocks(codes.flatten().float()) / _LARGEST * absmax[:, None]
    return blocks.flatten()[: codes.numel()].view(codes.shape)


def dequantize(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an export with `quantize: int8`, by name, as float32; tensors that are not quantised stay as they
    are."""
    scales = {name for name in tensors if name.endswith(ABSMAX) and name.removesuffix(ABSMAX) in tensors}
    return {
        name: dequantized(tensor, tensors[name + ABSMAX]) if name + ABSMAX in scales else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """[N] as [blocks, BLOCK], filled up with zeros."""
    missing = -len(values) % BLOCK
    filled = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return filled.view(-1, BLOCK)
