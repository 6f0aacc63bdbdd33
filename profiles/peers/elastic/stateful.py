"""torchdata's `StatefulDataLoader` over a map-style data set, with its `StatefulDistributedSampler`.

It has no mixtures and no packing of its own. Its ranks run one after another, with one worker each.
"""

from __future__ import annotations

from pathlib import Path

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from profiles.peers.elastic.matrix import Asked, Given, NotOfferedError, Run, samples

PACKAGE = "torchdata"
IS_PAIRWISE = False


def make(folder: Path) -> None:
    """It reads what is in memory."""


def runner(folder: Path) -> Run:
    numbers = list(samples(0))

    def loader_of(asked: Asked, rank: int) -> StatefulDataLoader[int]:
        sampler = StatefulDistributedSampler(numbers, num_replicas=asked.world_size, rank=rank, seed=0, drop_last=True)
        return StatefulDataLoader(numbers, batch_size=asked.batch_size, sampler=sampler, num_workers=1, drop_last=True)

    def run(asked: Asked) -> Given:
        if asked.is_mixed or asked.is_packed:
            raise NotOfferedError("a data set of its own is neither mixed nor packed")
        parts, states = [], []
        for rank in range(asked.world_size):
            loader = loader_of(asked, rank)
            if asked.states is not None:
                loader.load_state_dict(asked.state_of(rank))
            part = []
            for batch in loader:
                part.append([(number,) for number in batch.tolist()])
                if len(part) == asked.num_steps:
                    break
            states.append(loader.state_dict())
            parts.append(part)
        num_steps = min(map(len, parts))
        return Given([[row for part in parts for row in part[step]] for step in range(num_steps)], states)

    return run
