"""Megatron Energon: WebDatasets prepared by `energon prepare`, a metadataset that blends, packing by a task encoder.

Its documentation asks that ranks x workers stay the same over a training and the micro-batch, too: so a job that is saved at a
ranks and resumed at b has lcm(a, b) workers in all, and a step is several micro-batches. States are redistributed by `energon
checkpoint redist`. With KEEP_WORKERS=1 in the environment each rank has one worker at both world sizes instead.
"""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.energon import (
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from profiles.peers.elastic.matrix import BUFFER, GLOBAL_BATCH, LENGTH, Asked, Given, Run, documents, samples

PACKAGE = "megatron-energon"
IS_PAIRWISE = True
PER_SHARD = 100


def make(folder: Path) -> None:
    for source in range(2):
        _write(folder / f"numbers-{source}", [f"{number}" for number in samples(source)])
        _write(folder / f"tokens-{source}", [" ".join(map(str, tokens.tolist())) for tokens in documents(source)])


def _write(place: Path, texts: list[str]) -> None:
    if place.exists():
        return
    place.mkdir()
    for first in range(0, len(texts), PER_SHARD):
        with tarfile.open(place / f"shard-{first // PER_SHARD:04}.tar", "w") as tar:
            for number in range(first, min(first + PER_SHARD, len(texts))):
                data = texts[number].encode()
                member = tarfile.TarInfo(f"{number:06}.txt")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    prepare = [
        "prepare",
        str(place),
        "--non-interactive",
        "--split-ratio",
        "1,0,0",
        "--num-workers",
        "2",
        "--no-progress",
    ]
    fields = ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
    _energon(*prepare, *fields)


def _energon(*arguments: str) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "energon"), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RuntimeError(
            f"energon {arguments[0]} {arguments[1] if arguments[0] == 'checkpoint' else ''}: {lines[-1]}"
        )


@edataclass
class Tokens(Sample):  # type: ignore[misc]
    tokens: list[int]


class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
    @stateless  # type: ignore[untyped-decorator]
    def encode_sample(self, sample: Any) -> Any:
        return Tokens.derive_from(sample, tokens=list(map(int, sample.text.split(" "))))

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """First fit of the documents of the buffer."""
        packs: list[list[Any]] = []
        spaces: list[int] = []
        for one in samples:
            length = len(one.tokens)
            place = next((n for n, space in enumerate(spaces) if space >= length), None)
            if place is None:
                packs.append([one])
                spaces.append(LENGTH - length)
            else:
                packs[place].append(one)
                spaces[place] -= length
        return packs

    @stateless  # type: ignore[untyped-decorator]
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return Tokens.derive_from(samples[0], tokens=[token for one in samples for token in one.tokens])

    @stateless  # type: ignore[untyped-decorator]
    def batch(self, samples: list[Any]) -> Any:
        return [tuple(one.tokens) for one in samples]


def runner(folder: Path) -> Run:
    def path_of(asked: Asked) -> Path:
        kind = "tokens" if asked.is_packed else "numbers"
        if not asked.is_mixed:
            return folder / f"{kind}-0"
        path = folder / f"{kind}-{asked.weights[0]}.yaml"
        blend = "".join(f"      - {{weight: {weight}, path: ./{kind}-{n}}}\n" for n, weight in enumerate(asked.weights))
        path.write_text(
            "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n" + blend
        )
        return path

    def run(asked: Asked) -> Given:
        keeps = bool(os.environ.get("KEEP_WORKERS"))
        total = asked.world_size if keeps else math.lcm(asked.world_size, asked.other_world_size)
        micro_batch, num_micro = GLOBAL_BATCH // total, total // asked.world_size
        states = None if asked.states is None else _redistributed(asked)
        parts, after = [], []
        for rank in range(asked.world_size):
            config = WorkerConfig(rank=rank, world_size=asked.world_size, num_workers=total // asked.world_size)
            dataset = get_train_dataset(
                path_of(asked),
                batch_size=micro_batch,
                shuffle_buffer_size=100,
                max_samples_per_sequence=100,
                packing_buffer_size=BUFFER if asked.is_packed else None,
                task_encoder=Encoder(),
                worker_config=config,
            )
            loader = get_savable_loader(dataset)
            if states is not None:
                loader.restore_state_rank(states[rank])
            iterator = iter(loader)
            parts.append([[row for _ in range(num_micro) for row in next(iterator)] for _ in range(asked.num_steps)])
            after.append(loader.save_state_rank())
        return Given([[row for part in step for row in part] for step in zip(*parts, strict=True)], after)

    return run


def _redistributed(asked: Asked) -> list[Any]:
    """By the tool: a file of each rank, as `save_state_rank` gives it, to a file of each new rank."""
    assert asked.states is not None
    if len(asked.states) == asked.world_size:
        return [asked.state_of(rank) for rank in range(asked.world_size)]
    with tempfile.TemporaryDirectory() as place:
        files = [f"{place}/rank-{rank}.pt" for rank in range(len(asked.states))]
        for file, state in zip(files, asked.states, strict=True):
            torch.save(state, file)
        Path(place, "new").mkdir()
        _energon("checkpoint", "redist", *files, f"{place}/new", "--new-world-size", str(asked.world_size))
        return [torch.load(f"{place}/new/rank-{rank}.pt", weights_only=False) for rank in range(asked.world_size)]
