"""Folders as DeepSpeed writes them of a ZeRO run, made of whole tensors by torch alone."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
ALIGNMENT = 2  # elements a rank, to which DeepSpeed fills up the flat vectors of ZeRO 1 and 2


@contextmanager
def deepspeed_classes() -> Iterator[tuple[Any, Any]]:
    """(LossScaler, ZeroStageEnum) under the names that they have in DeepSpeed, which must not be imported by a reader."""

    class LossScaler:
        def __init__(self) -> None:
            self.cur_scale = 4.0

    class ZeroStageEnum(IntEnum):
        weights = 3
        gradients = 2
        optimizer_states = 1

    made = {"deepspeed.runtime.fp16.loss_scaler": LossScaler, "deepspeed.runtime.zero.config": ZeroStageEnum}
    parents = {name.rpartition(".")[0] for name in made} | {"deepspeed", "deepspeed.runtime"}
    for name in (*sorted(parents), *made):
        sys.modules[name] = ModuleType(name)
    for name, kind in made.items():
        kind.__module__, kind.__qualname__ = name, kind.__name__
        setattr(sys.modules[name], kind.__name__, kind)
    try:
        yield LossScaler, ZeroStageEnum
    finally:
        for name in (*parents, *made):
            del sys.modules[name]


def write_zero(
    folder: Path,
    stage: int,
    num_ranks: int,
    groups: Sequence[Tensors],
    states: dict[str, Tensors],
    *,
    frozen: Tensors,
    buffers: Tensors,
    tied: dict[str, str],
    sub_group: int = 2,
    gap: int = 0,
    more: dict[str, Any] | None = None,
) -> None:
    """Write `folder`, of the fp32 weights `groups` (one table a parameter group) and `states` (kind -> name -> state).

    ZeRO 3 puts `sub_group` parameters into one flat vector; ZeRO 1 and 2 leave `gap` elements behind each parameter but the
    last of a group. `more` are entries beside.
    """
    folder.mkdir(parents=True)
    lines = [
        dict(list(group.items())[at : at + sub_group]) for group in groups for at in range(0, len(group), sub_group)
    ]
    flats = lines if stage == 3 else list(groups)
    shapes = [OrderedDict((name, tensor.shape) for name, tensor in flat.items()) for flat in flats]
    whole = {name: tensor for group in groups for name, tensor in group.items()}
    with deepspeed_classes() as (loss_scaler, stages):
        for rank in range(num_ranks):
            if stage == 3:
                weights = [_sharded(flat, rank, num_ranks) for flat in flats]
            else:
                weights = [_cut(flat, rank, num_ranks, gap) for flat in flats]
            state: dict[int, dict[str, Any]] = {}
            for number, flat in enumerate(flats):
                state[number] = {"step": torch.tensor(3.0)}
                for kind, named in states.items():
                    mine = {name: named[name] for name in flat}
                    padded = (
                        _sharded(mine, rank, num_ranks) if stage == 3 else _cut(mine, rank, num_ranks, gap, whole=True)
                    )
                    state[number][kind] = padded
            at = 0
            param_groups = []
            for number, group in enumerate(groups):
                count = -(-len(group) // sub_group) if stage == 3 else 1
                param_groups.append({"lr": 0.1 * (number + 1), "params": [*range(at, at + count)]})
                at += count
            base = {"state": state, "param_groups": param_groups}
            optimizer = {"loss_scaler": loss_scaler(), "zero_stage": stages(stage)}
            if stage == 3:
                optimizer |= {"partition_count": num_ranks, "optimizer_state_dict": base, "fp32_flat_groups": weights}
            else:
                gaps = [[gap] * (len(flat) - 1) + [0] for flat in flats]
                optimizer |= {"partition_count": [num_ranks] * len(flats), "base_optimizer_state": base}
                optimizer |= {"single_partition_of_fp32_groups": weights, "param_alignment_paddings": gaps}
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, folder / name)
            if stage == 3 or rank == 0:
                given = {**buffers, **{name: tensor.bfloat16() for name, tensor in {**whole, **frozen}.items()}}
                given |= {alias: given[name] for alias, name in tied.items()}
                if stage == 3:
                    given = {name: given[name] if name in buffers else torch.empty(0).bfloat16() for name in given}
                fragments = {
                    name: _sharded({name: tensor}, rank, num_ranks) if stage == 3 else tensor
                    for name, tensor in frozen.items()
                }
                model = {
                    "module": OrderedDict(given),
                    "buffer_names": [*buffers],
                    "optimizer": None,
                    "param_shapes": shapes,
                    "frozen_param_shapes": OrderedDict((name, tensor.shape) for name, tensor in frozen.items()),
                    "frozen_param_fragments": OrderedDict(fragments),
                    "shared_params": tied,
                    "global_steps": 3,
                    **(more or {}),
                }
                torch.save(model, folder / (f"zero_pp_rank_{rank}_" * (stage == 3) + "mp_rank_00_model_states.pt"))


def _sharded(tensors: Tensors, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's parts of ZeRO 3: each tensor is filled up to a multiple of the ranks."""
    parts = []
    for tensor in tensors.values():
        each = -(-tensor.numel() // num_ranks)
        filled = torch.nn.functional.pad(tensor.reshape(-1), (0, each * num_ranks - tensor.numel()), value=-7.0)
        parts.append(filled[rank * each : (rank + 1) * each])
    return torch.cat(parts).clone()


def _cut(tensors: Tensors, rank: int, num_ranks: int, gap: int, *, whole: bool = False) -> torch.Tensor:
    """A rank's part of ZeRO 1 and 2; with `whole` the last rank's is filled up: a state is, weights are not."""
    fills = [gap] * (len(tensors) - 1) + [0]
    line = torch.cat(
        [
            torch.nn.functional.pad(t.reshape(-1), (0, fill), value=-7.0)
            for t, fill in zip(tensors.values(), fills, strict=True)
        ]
    )
    each = -(-line.numel() // (num_ranks * ALIGNMENT)) * ALIGNMENT
    filled = torch.nn.functional.pad(line, (0, each * num_ranks - line.numel()), value=-7.0)
    part = filled[rank * each : (rank + 1) * each].clone()
    unused = each * num_ranks - line.numel()
    return part if whole or rank < num_ranks - 1 or not unused else part[: max(0, each - unused)].clone()
