"""Train a small GPT on packed documents of two sources, stop at any step, and continue with another number of ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 20 --folder runs/gpt
    torchrun --nproc-per-node 3 examples/train_gpt.py --steps 40 --folder runs/gpt

The losses are those of a run that was never stopped, to the last bit. Of loaderkit that takes nothing: a position of the order
says what a sequence holds, whoever reads it, and the global batch is the same, 12 sequences. Of the training it takes that no
sum depends on who sums: a sequence goes through the model alone, and gradients are summed as whole numbers in float64.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

import loaderkit

GLOBAL_BATCH, LENGTH, WIDTH, NUM_HEADS, NUM_LAYERS, VOCABULARY = 12, 96, 32, 4, 3, 128
GRID = 2.0**30  # gradients are rounded to its inverse

NAMES = ["ROSALIND", "ORLANDO", "TOUCHSTONE", "CELIA", "DUKE", "ADAM", "OLIVER", "PHEBE", "SILVIUS", "AUDREY"]
NOUNS = ["love", "crown", "forest", "fool", "night", "sword", "letter", "heart", "brother", "storm", "tongue", "ring"]
VERBS = ["doth keep", "would betray", "hath seen", "shall find", "cannot forget", "must follow"]
ADJECTIVES = ["sweet", "gentle", "cruel", "idle", "noble", "merry", "weary", "secret"]


def make_text(folder: Path, num_speeches: int) -> None:
    """Two files of characters, in which 0 ends a document: speeches of a play, and verses, which are fewer and shorter."""
    rng = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)

    def line() -> str:
        subject, thing = rng.choice(NOUNS), rng.choice(NOUNS)
        return f"the {rng.choice(ADJECTIVES)} {subject} {rng.choice(VERBS)} my {rng.choice(ADJECTIVES)} {thing}"

    speeches = [f"{rng.choice(NAMES)}:\n" + ",\n".join(line() for _ in range(rng.choice([1, 1, 2, 4, 7]))) + ".\n"
                for _ in range(num_speeches)]  # fmt: skip
    verses = [f"O {line()}!\n" for _ in range(num_speeches // 3)]
    for name, documents in ("speeches", speeches), ("verses", verses):
        text = "".join(f"{document}\0" for document in documents)
        np.save(folder / f"{name}.npy", np.frombuffer(text.encode("ascii"), np.uint8))


def make_loader(folder: Path, rank: int, world_size: int) -> loaderkit.Loader:
    files = {name: loaderkit.Pipeline.tokens(folder / f"{name}.npy", end=0) for name in ("speeches", "verses")}
    changes = [(60, {"speeches": 0.5, "verses": 0.5})]  # from the 60th document of an epoch on
    mixed = loaderkit.Pipeline.mix(
        files, {"speeches": 0.8, "verses": 0.2}, stop="all", epochs={"verses": 2}, changes=changes
    )
    pipeline = mixed.shuffle(seed=1).read().pack(LENGTH, window=50).batch(GLOBAL_BATCH // world_size)
    return loaderkit.build(pipeline, rank=rank, world_size=world_size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(self.norm(x)).reshape(LENGTH, 3, NUM_HEADS, -1).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(0, 1).reshape(LENGTH, WIDTH))
        mixed: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class GPT(nn.Module):
    """Of one packed sequence: the sum of the losses of all tokens but the first of each document, and the number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, places: torch.Tensor, documents: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (documents[:, None] == documents).tril()  # to earlier tokens of the same document
        x = self.tokens(tokens.long()) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        is_followed = (documents[1:] == documents[:-1]) & (documents[1:] >= 0)
        losses = F.cross_entropy(self.head(self.norm(x))[:-1], tokens[1:].long(), reduction="none")
        return (losses * is_followed).sum(), is_followed.sum()


def global_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """The mean loss of a token of the global batch; its gradient is left in the parameters.

    Rounded to a grid, gradients and losses are whole numbers, whose sums float64 holds exactly up to 2**53: in any order they
    are the same.
    """
    parameters = list(model.parameters())
    sums = torch.zeros(sum(parameter.numel() for parameter in parameters) + 2, dtype=torch.float64)
    for slot in range(len(batch["input_ids"])):
        if "__wrapped__" in batch and batch["__wrapped__"][slot]:  # read again at the end, for ranks to be equal
            continue
        loss, num_tokens = model(*(batch[name][slot] for name in ("input_ids", "position_ids", "document_ids")))
        gradients = torch.autograd.grad(loss, parameters)
        values = torch.cat([*(gradient.reshape(-1) for gradient in gradients), loss.detach().reshape(1)])
        sums[:-1] += (values.double() * GRID).round()
        sums[-1] += num_tokens
    dist.all_reduce(sums)
    assert sums.abs().max() < 2**53, "larger sums are rounded"
    means = sums[:-1] / GRID / sums[-1]
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, mean in zip(parameters, torch.split(means[:-1], sizes), strict=True):
        parameter.grad = mean.reshape(parameter.shape).float()
    return means[-1].item()


def train(arguments: list[str] | None = None) -> None:
    """What each rank of the process group does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/gpt"))
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--speeches", type=int, default=150, help="of the text that is made, if there is none yet")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on all ranks
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world_size:
        raise SystemExit(f"{world_size} ranks do not share {GLOBAL_BATCH} sequences evenly")
    if rank == 0 and not (args.folder / "text" / "verses.npy").exists():
        make_text(args.folder / "text", args.speeches)
    dist.barrier()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoints = loaderkit.CheckpointManager(args.folder / "checkpoints", every=args.save_every)
    with make_loader(args.folder / "text", rank, world_size) as loader, checkpoints:
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = checkpoints.restore(state) or 0  # the newest whole one, whatever number of ranks has saved it
        if rank == 0:
            print(f"continues after step {step} with {world_size} ranks" if step else "begins anew")
        while step < args.steps:
            for batch in loader:
                loss = global_loss(model, batch)
                optimizer.step()
                step += 1
                if rank == 0:
                    print(f"step {step} epoch {loader.epoch} loss {loss:.4f} {loss.hex()}", flush=True)
                checkpoints.save(step, state, force=step == args.steps)
                if step == args.steps:
                    break


def main() -> None:
    dist.init_process_group("gloo")  # for CPUs; torchrun says which rank this is
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
