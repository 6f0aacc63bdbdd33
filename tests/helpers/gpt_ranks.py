"""What each rank does in the test that trains a GPT: the example, with its output in a file."""

from __future__ import annotations

import importlib
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TextIO, cast

import torch.distributed as dist


class _Log:
    """What is printed goes to `file`; the process ends at once, as if killed, when it would print a line of step `dies_at`."""

    def __init__(self, file: TextIO, dies_at: int | None) -> None:
        self._file = file
        self._dies_at = dies_at

    def write(self, text: str) -> int:
        if text.startswith(f"step {self._dies_at} "):
            os._exit(9)
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()


def train(rank: int, num_ranks: int, log: Path, cache: Path, arguments: list[str], dies_at: int | None) -> None:
    """Run the example's training; what rank 0 prints is in `log`."""
    os.environ["LOADERKIT_CACHE_DIR"] = str(cache)
    dist.init_process_group("gloo", init_method=f"file://{log}.store", rank=rank, world_size=num_ranks)
    example: Any = importlib.import_module("examples.train_gpt")
    with open(log if rank == 0 else os.devnull, "w") as file, redirect_stdout(cast(TextIO, _Log(file, dies_at))):
        example.train(arguments)
    dist.destroy_process_group()
