"""Train under Ray Train: workers may be killed and nodes taken away, and training continues with the very next batch.

    python examples/ray_train.py --workers 2 --steps 20 --folder runs/ray      # RAY_ADDRESS says of which cluster
    python examples/ray_train.py --workers 2 --steps 40 --folder runs/ray      # continues after step 20

Ray Train starts all workers again when one of them fails; each restores the newest whole checkpoint: model, optimizer, loader
and losses. The losses are those of a run that nothing happened to, to the last bit. All nodes share `--folder`, which may be a
bucket: s3://bucket/runs/ray. Another number of workers continues with the same samples in each step. What the ranks have waited
for goes through Ray Train's reports to a callback. Runs on CPUs (gloo).
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

import ray.train
import ray.train.torch
import torch

import loaderkit

GLOBAL_BATCH = 12


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)  # the same weights on all ranks
    return torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


def make_loader(rank: int, world_size: int) -> loaderkit.Loader:
    data = torch.utils.data.TensorDataset(torch.arange(9600.0).reshape(1200, 8) / 9600, torch.arange(1200.0) / 1200)
    pipeline = (
        loaderkit.Pipeline.dataset(data, fields=["x", "y"])
        .shuffle(seed=1)
        .read()
        .batch(GLOBAL_BATCH // world_size, drop_last=True)
    )
    return loaderkit.build(pipeline.named("numbers"), rank=rank, world_size=world_size)


class Reports:
    """What `loaderkit.metrics.log` writes to: the reports of Ray Train. All ranks report after the same steps."""

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        ray.train.report({"step": step, **values})


class Stalls(ray.train.UserCallback):  # type: ignore[misc]
    """Prints how much of the time each rank has waited for its loader."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        waited = ", ".join(f"{rank['loaderkit/numbers/stall_percent']:.1f} %" for rank in metrics)
        print(f"up to step {metrics[0]['step']} the ranks have waited {waited} of the time")


def train(config: dict[str, Any]) -> Any:
    """What every worker does; the losses of all steps, from the first one of the training on."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(make_model())  # wrapped in DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = make_loader(rank, world_size)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "losses": []}
    reports, is_leaving = Reports(), False
    with loader, loaderkit.CheckpointManager(config["folder"], every=config["save_every"]) as checkpoints:
        first = checkpoints.restore(state) or 0  # the newest whole one
        batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
        for step, batch in zip(range(first + 1, config["steps"] + 1), batches, strict=False):
            loss = (model(batch["x"]).squeeze(1) - batch["y"]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach() / world_size
            torch.distributed.all_reduce(mean)
            state["losses"].append(mean.item())
            if step % config["report_every"] == 0:
                loaderkit.metrics.log(loader, reports, step)
            is_last = step == config["steps"]
            # That a node will be taken away: the same answer on all ranks, which wait for one another here.
            is_leaving = ray.train.get_preemption_info() is not None and not is_last
            checkpoints.save(step, state, force=is_leaving or is_last)  # copied, and written behind the next steps
            if is_leaving:
                break
    if is_leaving:  # the checkpoint is whole now; an error, as a worker that returns is done
        raise RuntimeError(f"a node is being taken away: step {step} is saved, and others continue behind it")
    return state["losses"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="runs/ray", help="a folder that all nodes share, or s3://bucket/prefix")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--report-every", type=int, default=10, metavar="STEPS")
    options = parser.parse_args()
    folder = options.folder if "://" in options.folder else os.path.abspath(options.folder)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={
            "folder": folder,
            "steps": options.steps,
            "save_every": options.save_every,
            "report_every": options.report_every,
        },
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=10), callbacks=[Stalls()]),
    )
    result: Any = trainer.fit()
    for step, loss in enumerate(result.return_value, 1):
        print(f"step {step}: {loss:.9g}")


if __name__ == "__main__":
    main()
