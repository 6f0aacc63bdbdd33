"""Recognises what a file of a checkpoint is, by its name and by its first bytes."""

from __future__ import annotations

import re
from typing import Literal

from loaderkit.checkpoint.formats import safetensors, zip_records
from loaderkit.checkpoint.formats.state_file import STATE

METADATA = ".metadata"
INDEX = ".index.json"
DESCRIBING = (METADATA, INDEX, STATE)
"""Ends the names of the files whose presence tells readers that a checkpoint is whole."""
USUAL_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (*USUAL_SUFFIXES, ".tar")
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\..*)", re.DOTALL)
"""The name of one of several files: (stem, number, how many, suffix)."""
INDEX_NAME = re.compile(r".+(\.\w+)\.index(?:\.[\w-]+)?\.json")
"""The name of an index of shards, as of model.safetensors.index.json: (their suffix). There may be a variant before
".json"."""
HEAD_BYTES = 512
"""The bytes of a file that `kind_of` looks at."""
# What frameworks write beside the weights: transformers, accelerate, Lightning, DeepSpeed, Megatron.
_BESIDE = re.compile(
    r"(optimizer|optim|scheduler|lr_scheduler|scaler|rng_state|random_states|training_args|sampler|dl_state_dict|args|common"
    r"|meta|trainer_state|train_state|extra_state|custom_checkpoint)([-_]\w+)*\.\w+"
)
_PRETRAINED = re.compile(r"(diffusion_)?(pytorch_)?(adapter_)?(model|consolidated)\b.*|.+\.index\..*json", re.DOTALL)
_STEP = re.compile(r"(?:step|steps|checkpoint|ckpt|iter|iteration)[-_=]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)(?:\.(?:pt|pth|ckpt|tar))?")
_LEGACY = b"\x80\x02\x8a\x0al\xfc"  # of torch.save before torch 1.6
Kind = Literal["safetensors", "torch", "legacy", "tar"]


def step_in(name: str) -> int | None:
    """The training step in a checkpoint's name, such as 1000 of "step-0000001000"; None for a name without one."""
    found = _STEP.findall(name)
    if found:
        return int(found[-1])
    number = _NUMBER.fullmatch(name)
    return int(number[1]) if number else None


def is_description(name: str) -> bool:
    """True for a file that names the files of the checkpoint in its directory."""
    return name in (METADATA, STATE) or INDEX_NAME.fullmatch(name) is not None


def is_beside(name: str) -> bool:
    """True for a file that frameworks write beside the weights, such as optimizer.pt."""
    return _BESIDE.fullmatch(name) is not None


def is_pretrained(name: str) -> bool:
    """True for a model's file, or a shard of it, that frameworks look for by its name, such as pytorch_model.bin."""
    return _PRETRAINED.fullmatch(name) is not None


def kind_of(head: bytes, size: int) -> Kind | None:
    """What a file of `size` bytes is, as far as its first bytes say, or None if it is no file of a checkpoint."""
    if head.startswith(zip_records.MAGIC):
        return "torch"
    if head.startswith(_LEGACY):
        return "legacy"
    if safetensors.looks_like_safetensors(head, size):
        return "safetensors"
    return "tar" if head[257:262] == b"ustar" else None
