"""Ray Train. SIGTERM ends one worker, and Ray Train starts all of them again, which is the run `after`. What nothing happens to
trains by the same function without Ray.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray.train.torch
from ray_clusters import ray_cluster
from torch.nn.parallel import DistributedDataParallel

import loaderkit
from loaderkit import CheckpointManager
from loops.common import NUM_EPOCHS, Rank, Run, loss_of, make_model, make_optimizer


class Worker(Rank):
    def signal(self) -> None:
        """Only to one, which then waits for its end."""
        if self.number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()


class Reported:
    """A writer that reports to Ray Train. All workers report in the same steps."""

    def log(self, values: dict[str, float], step: int) -> None:
        ray.train.report({"step": step, **values})


@dataclass
class History(ray.train.UserCallback):  # type: ignore[misc]
    """Writes down what Ray Train has of rank 0's reports."""

    place: Path

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        with self.place.open("a") as file:
            print(json.dumps(metrics[0]), file=file)


@contextmanager
def session() -> Iterator[None]:
    """A cluster, whose processes have this environment."""
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "600"  # beside other programs
    with ray_cluster(4) as cluster:
        ray.init(cluster.address, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


def run_ranks(run: Run, folder: Path) -> None:
    if run.name in {"after", "at-2"}:  # the former is what Ray Train does by itself, and the same
        return
    if run.name == "whole":
        importlib.import_module("loops.__main__").fork_ranks(train, run, folder)
        return
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={"run": run, "folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=run.num_ranks),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=0 if run.signalled_at is None else 1),
            callbacks=[History(folder / "logs")] if run.name == "signalled" else [],
        ),
    )
    trainer.fit()


def train_worker(given: dict[str, Any]) -> None:
    run, folder, number = given["run"], given["folder"], ray.train.get_context().get_world_rank()
    if (folder / f"{run.name}-{number}.jsonl").exists():
        run = replace(run, name="after", signalled_at=None, resumes=True)
    rank = Worker(run=run, number=number, folder=folder)
    train(rank, Reported() if rank.run.name in {"signalled", "after"} else None)


def train(rank: Rank, writer: Reported | None = None) -> None:
    model = DistributedDataParallel(make_model())
    optimizer, loader = make_optimizer(model), rank.loader()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    with loader, CheckpointManager(rank.checkpoints, every=1000) as checkpoints:
        step = (checkpoints.restore(state, step=rank.run.resumes_at) or 0) if rank.run.resumes else 0
        for _ in range(loader.epoch, NUM_EPOCHS):
            for batch in loader:
                step += 1
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if writer is not None:
                    rank.logged(step, loaderkit.metrics.log(loader, writer, step))
                checkpoints.save(step, state, force=step == rank.run.saves_at)
                checkpoints.wait_until_finished()
                rank.trained(step, batch, loss)


def logged(place: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    return {line.pop("step"): line for line in lines}
