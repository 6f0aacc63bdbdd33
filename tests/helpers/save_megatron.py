"""Saves a made-up state by Megatron's own `dist_checkpointing` (torch_dist), on the ranks of torchrun, on the CPU.

    torchrun --nproc-per-node N save_megatron.py FOLDER

Runs in an environment that has megatron-core, whose two questions to CUDA are answered here. Beside the folder lies
`latest_checkpointed_iteration.txt`, as a training run writes it, and `FOLDER.expected.pt` has the whole tensors.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject


def main(folder: Path) -> None:
    cuda: Any = torch.cuda
    cuda.synchronize, cuda.current_device = lambda *_: None, lambda: "cpu"
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    layers = torch.randn(3, 8, 4, generator=generator)
    words = torch.randn(12, 4, generator=generator).bfloat16()
    norm = torch.randn(4, generator=generator)
    model: dict[str, Any] = {
        f"layer{number}": ShardedTensor.from_rank_offsets(
            "decoder.layers.self_attention.linear_qkv.weight",
            layer.chunk(size)[rank].clone(),
            (0, number, len(layers)),
            (1, rank, size),
            prepend_axis_num=1,
        )
        for number, layer in enumerate(layers)
    }
    model["words"] = ShardedTensor.from_rank_offsets(
        "embedding.word_embeddings.weight", words.chunk(size)[rank].clone(), (0, rank, size)
    )
    model["norm"] = ShardedTensor.from_rank_offsets("decoder.final_layernorm.weight", norm.clone(), replica_id=rank)
    model["extra"] = ShardedObject(
        "decoder.layers.mlp._extra_state", io.BytesIO(b"scales"), (1,), (0,), replica_id=rank
    )
    state = {
        "model": model,
        "rng_state": ShardedObject("rng_state", [{"torch": torch.arange(3)}], (1,), (0,), replica_id=rank),
        "iteration": 100,
        "args": SimpleNamespace(hidden_size=4),
        "opt_param_scheduler": {"num_steps": 3, "lr": 0.5},
    }
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    if rank == 0:
        whole = {
            "decoder.layers.self_attention.linear_qkv.weight": layers,
            "embedding.word_embeddings.weight": words,
            "decoder.final_layernorm.weight": norm,
        }
        torch.save(whole, folder.with_name(f"{folder.name}.expected.pt"))
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
