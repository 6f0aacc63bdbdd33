"""Train on a folder of classes; stop at any time, and continue exactly there.

    python examples/train.py DATA --epochs 2 --checkpoint run.pt      # DATA/<class>/*.jpg
    python examples/train.py DATA --epochs 4 --checkpoint run.pt      # continues behind the last batch trained on

Model, optimizer and loader are saved together, in one file that is always whole.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import loaderkit


def make_model(num_classes: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes)),
    )


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, loader: loaderkit.Loader) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    temporary = path.with_name(path.name + ".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)  # a reader sees the old checkpoint or the new one, never half of one


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on a folder of classes.")
    parser.add_argument("data", help="a folder with one folder of images a class")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
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
    device = "cuda" if torch.cuda.is_available() else "cpu"  # as `transfer: auto` decides
    torch.manual_seed(0)
    with loaderkit.build(pipeline) as loader:
        model = make_model(len(loader.classes or [])).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if options.checkpoint.exists():
            state = torch.load(options.checkpoint, weights_only=True, map_location=device)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            print(f"resumed epoch {loader.epoch} from {options.checkpoint}")

        num_batches = 0
        for _ in range(loader.epoch, options.epochs):
            for batch in loader:  # one epoch; the first one, after resuming, is what was left of it
                loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"].long())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                num_batches += 1
                print(f"epoch {loader.epoch} batch {num_batches} loss {loss.item():.3f} first {batch['__key__'][0]}")
                if num_batches % options.save_every == 0:
                    save(options.checkpoint, model, optimizer, loader)
                if num_batches == options.max_batches:
                    break
            if num_batches == options.max_batches:
                break
        save(options.checkpoint, model, optimizer, loader)
        print(f"training waited {loader.stats().to_dict()['stall']['percent']:.1f} % of the time")


if __name__ == "__main__":
    main()
