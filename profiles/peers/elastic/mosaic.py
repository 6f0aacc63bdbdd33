"""Mosaic streaming: MDS shards in `StreamingDataset` and `StreamingDataLoader`; streams with proportions mix.

The ranks are processes of one node that set up their group themselves. It has no packing.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers.tokenization_utils_base  # noqa: F401 - it must look for torchvision before there is a stand-in


def _stand_in(name: str, **members: Any) -> None:
    """Its ready-made torchvision data sets are not used here."""
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules.setdefault(name, module)


_stand_in("torchvision")
_stand_in("torchvision.datasets", VisionDataset=object)
_stand_in("torchvision.transforms")
_stand_in("torchvision.transforms.functional", to_tensor=None)

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

from profiles.peers.elastic.matrix import Asked, Given, NotOfferedError, Run, samples  # noqa: E402

PACKAGE = "mosaicml-streaming"
IS_PAIRWISE = False
PATIENCE_S = 90.0


def make(folder: Path) -> None:
    for source in range(2):
        place = folder / f"{source}"
        if not place.exists():
            with MDSWriter(out=str(place), columns={"x": "int"}, size_limit=2048) as writer:
                for number in samples(source):
                    writer.write({"x": number})


def runner(folder: Path) -> Run:
    def run(asked: Asked) -> Given:
        if asked.is_packed:
            raise NotOfferedError("packing")
        clean_stale_shared_memory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(asked.world_size)]
        ranks = [
            context.Process(target=_train, args=(folder, asked, rank, port, pipe[1])) for rank, pipe in enumerate(pipes)
        ]
        for rank, (_, sender) in zip(ranks, pipes, strict=True):
            rank.start()
            sender.close()
        try:
            answers = [_answer_of(receiver) for receiver, _ in pipes]
        finally:
            for rank in ranks:
                rank.join(5)
                if rank.is_alive():
                    rank.kill()
                    rank.join()
        parts = [steps for steps, _ in answers]
        return Given(
            [[row for part in step for row in part] for step in zip(*parts, strict=False)],
            [state for _, state in answers],
        )

    return run


def _answer_of(receiver: Connection) -> tuple[Any, Any]:
    if not receiver.poll(PATIENCE_S):
        raise TimeoutError(f"no answer from a rank within {PATIENCE_S:.0f} s")
    try:
        answer = receiver.recv()
    except EOFError:
        raise RuntimeError("a rank died") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer  # type: ignore[no-any-return]


def _train(folder: Path, asked: Asked, rank: int, port: int, sender: Connection) -> None:
    size = str(asked.world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        sender.send(_steps_of(folder, asked, rank))
    except Exception as error:
        traceback.print_exc()
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))
    finally:
        sender.close()
        os._exit(0)


def _steps_of(folder: Path, asked: Asked, rank: int) -> tuple[Any, Any]:
    streams = [
        Stream(local=str(folder / f"{n}"), **({"proportion": asked.weights[n]} if asked.is_mixed else {}))
        for n in range(2 if asked.is_mixed else 1)
    ]
    dataset = StreamingDataset(streams=streams, shuffle=True, batch_size=asked.batch_size, num_canonical_nodes=1)
    loader = StreamingDataLoader(dataset, batch_size=asked.batch_size)
    if asked.states is not None:
        loader.load_state_dict(asked.state_of(rank))
    steps, iterator = [], iter(loader)
    for _ in range(asked.num_steps):
        batch = next(iterator, None)
        if batch is None:
            break
        steps.append([(x,) for x in batch["x"].tolist()])
    return steps, loader.state_dict()
