"""Train on a folder of classes; stop at any time, and continue exactly there.

    python examples/train.py DATA --epochs 2 --checkpoints runs/a      # DATA/<class>/*.jpg
    python examples/train.py DATA --epochs 4 --checkpoints runs/a      # continues behind the last batch trained on

Model, optimizer, loader and random numbers are saved together, behind training; a checkpoint is there whole or not at all.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

import loaderkit
from loaderkit.checkpoint import RngState


def make_model(num_classes: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on a folder of classes.")
    parser.add_argument("data", help="a folder with one folder of images a class")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder, or s3://bucket/prefix")
    parser.add_argument("--save-every", type=int, default=100, metavar="BATCHES")
    parser.add_argument("--max-batches", type=int, help="stop after this many batches, also in mid-epoch")
    options = parser.parse_args()

    pipeline = (
        loaderkit.Pipeline.files(options.data, include="**/*.{jpg,jpeg,JPEG,png}", label="parent")
        .shuffle(seed=0)
        .epochs(options.epochs)  # after the last one, iterating yields nothing
        .read()
        .decode()
        .random_resized_crop(224)
        .random_horizontal_flip()
        .batch(options.batch_size, drop_last=True)
        .transfer("auto")
        .normalize(mean="imagenet", std="imagenet")
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(
            int(os.environ.get("LOCAL_RANK", "0"))
        )  # before `build`: `transfer: auto` is the current one
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    checkpoints = loaderkit.CheckpointManager(options.checkpoints, every=options.save_every, keep={"last": 2})
    with loaderkit.build(pipeline) as loader, checkpoints:
        model = make_model(len(loader.classes or [])).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": RngState()}
        first = checkpoints.restore(state) or 0  # in place, from the newest one that is whole
        last = options.epochs * len(loader)
        if options.max_batches is not None:
            last = min(last, first + options.max_batches)
        if first:
            print(f"resumed epoch {loader.epoch} after batch {first} from {options.checkpoints}")

        step = first
        for _ in range(loader.epoch, options.epochs):
            for batch in loader:  # one epoch; the first one, after resuming, is what was left of it
                loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"].long())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                step += 1
                print(f"epoch {loader.epoch} batch {step} loss {loss.item():.3f} first {batch['__key__'][0]}")
                # Does nothing but for every `--save-every` batches and the last one.
                checkpoints.save(step, state, force=step == last)
                if step == last:
                    break
            if step == last:
                break
        print(f"training waited {loader.stats().to_dict()['stall']['percent']:.1f} % of the time")


if __name__ == "__main__":
    main()
