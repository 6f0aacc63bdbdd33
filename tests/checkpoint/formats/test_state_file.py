"""A damaged `loaderkit-state.json` is a FormatError or CheckpointError, whatever is in it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit.checkpoint import StreamWriter
from loaderkit.checkpoint.formats.state_file import STATE
from loaderkit.errors import CheckpointError, FormatError

WRONG: list[Any] = [
    None, 1, -1, "x", "", [], {}, [1, "a"], {"$tuple": 3}, {"$tensor": ["F32", [-1], "AAAA"]},
    {"$array": ["<f4", [2**70], "AAAA", False]}, 2**80, "../x", {"a": {"b": 1}}, True,
]  # fmt: skip


def mutated(content: Any, rng: random.Random) -> bytes:
    """With one value, anywhere in it, removed or replaced by another."""
    copy = json.loads(json.dumps(content))
    node, last = copy, None
    while isinstance(node, (dict, list)) and node and (last is None or rng.random() < 0.85):
        key = rng.choice([*node]) if isinstance(node, dict) else rng.randrange(len(node))
        last, node = (node, key), node[key]
    assert last is not None
    table, key = last
    if isinstance(table, dict) and rng.random() < 0.3:
        del table[key]
    else:
        table[key] = rng.choice(WRONG)
    return json.dumps(copy).encode()


@pytest.mark.filterwarnings("ignore")
def test_damaged_in_any_way(tmp_path: Path, rng: random.Random) -> None:
    tied = torch.arange(6.0)
    state = {"model": {"w": tied}, "o": {"s": [{"a": torch.ones(2)}]}, "n": (1, b"x", float("inf"), torch.ones(2))}
    save(state, storage_writer=StreamWriter(tmp_path / "a", format="safetensors"), no_dist=True)
    path = tmp_path / "a" / STATE
    data = path.read_bytes()
    content, num_refused = json.loads(data), 0
    for number in range(300):
        broken = bytearray(data)
        broken[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(mutated(content, rng) if number % 2 else broken)
        try:
            loaderkit.restore(tmp_path / "a", verify=False, nested=number % 3 == 0)
        except (FormatError, CheckpointError):
            num_refused += 1
    assert num_refused > 100
    path.write_bytes(data)
    assert torch.equal(loaderkit.restore(tmp_path / "a", verify=True)["model.w"], tied)
