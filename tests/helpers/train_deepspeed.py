"""Trains a small model by DeepSpeed on the CPU, saves a checkpoint, and beside it what DeepSpeed itself makes of it.

    torchrun --nproc-per-node N train_deepspeed.py FOLDER STAGE DTYPE

Runs in an environment that has DeepSpeed. `FOLDER.expected.pt` gets the weights of `zero_to_fp32`, and of each parameter the
state of its optimizer as DeepSpeed's
`ds_to_universal` merges it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


class Model(torch.nn.Module):
    """Odd sizes, so that partitions cut rows; a frozen part, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 7)
        self.hidden = torch.nn.Linear(7, 11)
        self.norm = torch.nn.LayerNorm(11)
        self.register_buffer("offset", torch.arange(5.0) / 7)
        self.frozen = torch.nn.Linear(11, 5)
        self.back = torch.nn.Linear(5, 7)
        self.head = torch.nn.Linear(7, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.frozen(torch.tanh(self.norm(self.hidden(self.embedding(tokens)))))
        return self.head(self.back(hidden + self.offset.to(hidden.dtype)))


def settings_of(stage: int, dtype: str) -> dict[str, Any]:
    """DeepSpeed's config."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 20},
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "initial_scale_power": 4},
    }


def universal_state(folder: Path) -> dict[str, dict[str, Any]]:
    """Of each parameter the whole state of its optimizer, as DeepSpeed's conversion to "universal" checkpoints merges it."""
    program = "deepspeed.checkpoint.ds_to_universal"
    step = folder / (folder / "latest").read_text()
    with tempfile.TemporaryDirectory() as out:
        places = ["--input_folder", str(step), "--output_folder", out, "--inject_missing_state"]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        subprocess.run([sys.executable, "-m", program, *places, *workers], check=True)
        merged: dict[str, dict[str, Any]] = {}
        for path in sorted(Path(out, "zero").glob("*/*.pt")):
            content = torch.load(path, weights_only=False)
            value = content["param"] if isinstance(content, dict) else content
            merged.setdefault(path.parent.name, {})[path.stem] = value
        return merged


def main(folder: Path, stage: int, dtype: str) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Model()
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.ndim > 1 and p.requires_grad], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if p.ndim == 1 and p.requires_grad], "weight_decay": 0.0},
    ]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=settings_of(stage, dtype))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(0, 13, (4,), generator=generator)
        logits = engine(tokens)
        engine.backward(torch.nn.functional.cross_entropy(logits.float(), tokens))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"note": "mine", "numbers": [1, 2]})
    dist.barrier()
    if dist.get_rank() == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        torch.save(
            {"weights": dict(weights), "state": universal_state(folder)}, folder.with_name(f"{folder.name}.expected.pt")
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
