"""Stop and come back: model, optimizer, random numbers and the loader's position from the newest whole checkpoint.

    python examples/restore.py --steps 6 --folder runs

Run it again with more steps, and it continues where it stopped. `--check` compares with a run that was never stopped.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

import loaderkit
from loaderkit.checkpoint import latest, write_manifest
from loaderkit.errors import CheckpointError


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, loaderkit.Loader]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.arange(800.0).reshape(100, 8) / 800, torch.arange(100.0))
    pipeline = loaderkit.Pipeline.dataset(data, fields=["x", "y"]).shuffle(seed=1).read().batch(10, drop_last=True)
    return model, optimizer, loaderkit.build(pipeline)


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Save under a temporary name first, so that a file with the name of a checkpoint is whole."""
    path = folder / f"step-{step}.pt"
    temporary = folder / f"{path.name}.tmp"
    torch.save(state, temporary)
    os.replace(temporary, path)
    write_manifest(path)


def train(folder: Path, num_steps: int) -> float:
    """Continue from the newest whole checkpoint up to `num_steps`; returns the sum of all weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer, loader = make()
    step = 0
    try:
        restored = loaderkit.restore(latest(folder), nested=True)
        model.load_state_dict(restored["model"])
        optimizer.load_state_dict(restored["optimizer"])
        torch.set_rng_state(restored["rng"])
        loader.load_state_dict(restored["loader"])
        step = restored["step"]
        print(f"continues after step {step}")
    except CheckpointError as error:
        print(f"begins anew: {error}".splitlines()[0])
    with loader:
        while step < num_steps:
            for batch in loader:
                loss = (model(batch["x"]).squeeze(1) - batch["y"]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                print(f"step {step}: {loss.item():.3f}")
                if step == num_steps:
                    break
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "loader": loader.state_dict(),
            "step": step,
        }
        save(folder, step, state)
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        train(args.folder / "stopped", args.steps // 2)
        stopped, whole = train(args.folder / "stopped", args.steps), train(args.folder / "whole", args.steps)
        print(f"stopped and resumed: {stopped!r}; never stopped: {whole!r}")
        assert stopped == whole
    else:
        train(args.folder, args.steps)


if __name__ == "__main__":
    main()
