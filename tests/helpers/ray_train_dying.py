"""examples/ray_train.py, to which something happens after given steps, each once in all attempts.

python ray_train_dying.py FOLDER EVENTS ARGUMENTS... [-- FOLDER EVENTS ARGUMENTS...]       # run after run

EVENTS is a list such as kill:3,drain:5, or empty. In FOLDER each attempt writes what each rank has trained and reported.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

import loaderkit

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
assert spec is not None
assert spec.loader is not None
example: Any = importlib.util.module_from_spec(spec)
sys.modules["ray_train"] = example
spec.loader.exec_module(example)
cloudpickle: Any = ray.cloudpickle
cloudpickle.register_pickle_by_value(example)
train = example.train


def write(place: Path, line: dict[str, Any]) -> None:
    with open(place, "a") as lines:
        print(json.dumps(line), file=lines)


def drain(attempt: int, folder: Path) -> None:
    """Announce that this worker's node will go, and note it."""
    import ray._private.worker as ray_worker
    import ray.core.generated.autoscaler_pb2 as messages

    node = ray.get_runtime_context().get_node_id()
    client: Any = getattr(ray_worker.global_worker, "gcs_client")  # noqa: B009 - what mypy does not know of
    reason = getattr(messages, "DrainNodeReason").Value("DRAIN_NODE_REASON_PREEMPTION")  # noqa: B009
    deadline_ms = int((time.time() + 600) * 1000)
    accepted, why = client.drain_node(node, reason, "taken away", deadline_ms)
    assert accepted, why
    (folder / "drained").write_text(f"{attempt} {node}")


def wait_for_preemption() -> None:
    """Until Ray Train has heard that a node will go. Raises TimeoutError after a minute: the node has no worker."""
    from ray.train.v2._internal.execution.context import get_train_context

    last = time.monotonic() + 60
    while get_train_context().preemption_context.preemption_info is None:
        if time.monotonic() > last:
            raise TimeoutError("Ray Train has not heard of a node that goes: it has no worker there")
        time.sleep(0.05)


def happen(event: str, folder: Path, attempt: int, rank: int) -> None:
    if event == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while event in {"worker", "driver"} and len(list(folder.glob(f"{event}-*-happened"))) < 2:
        time.sleep(0.01)  # until the other rank has written this step down, too
    if event == "worker" and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()  # in this step, whenever Ray ends the process
    if event == "driver" and rank == 0:
        os.kill(int((folder / "driver").read_text()), signal.SIGTERM)
        threading.Event().wait()
    if event == "drain" and rank == 0:
        drain(attempt, folder)
        wait_for_preemption()
    if event == "node" and rank == 0:
        os.kill(int((folder / "node").read_text()), signal.SIGTERM)  # its `ray start --block`
        wait_for_preemption()


def train_and_die(folder: Path, events: dict[int, str], config: dict[str, Any]) -> Any:
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    rank = ray.train.get_context().get_world_rank()
    attempt = len(list(folder.glob(f"attempt-*-{rank}")))
    (folder / f"attempt-{attempt}-{rank}").write_text(ray.get_runtime_context().get_node_id())
    numbers: list[int] = []

    def before_forward(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if isinstance(module, torch.nn.Sequential):
            numbers[:] = (inputs[0][:, 0] * 1200).round().int().tolist()

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = int(next(iter(optimizer.state.values()))["step"])
        write(folder / f"trained-{attempt}-{rank}.jsonl", {"step": step, "numbers": numbers})
        if step in events:
            try:
                (folder / f"{events[step]}-{rank}-happened").touch(exist_ok=False)
            except FileExistsError:
                return
            happen(events[step], folder, attempt, rank)

    def log(loader: loaderkit.Loader, writer: Any, step: int) -> dict[str, float]:
        values = logged(loader, writer, step)
        write(folder / f"returned-{rank}.jsonl", {"step": step, **values})
        return values

    logged = loaderkit.metrics.log
    setattr(loaderkit.metrics, "log", log)  # noqa: B010 - a module's
    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_post_hook(after_step)
    return train(config)


class Written(example.Stalls):  # type: ignore[misc]
    """Writes all reports as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        super().after_report(run_context, metrics, checkpoint)
        write(self.folder / "reported.jsonl", {"ranks": metrics})


def run(folder: Path, events: str, arguments: list[str]) -> None:
    pairs = (event.split(":") for event in events.split(",") if event)
    folder.mkdir(exist_ok=True)
    (folder / "driver").write_text(str(os.getpid()))
    example.train = partial(train_and_die, folder, {int(step): event for event, step in pairs})
    example.Stalls = partial(Written, folder)
    sys.argv[1:] = arguments
    example.main()


# Its workers are on several nodes where there are several.
setattr(ray.train, "ScalingConfig", partial(ray.train.ScalingConfig, placement_strategy="SPREAD"))  # noqa: B010
for is_end, given in itertools.groupby(sys.argv[1:], "--".__eq__):
    if not is_end:
        place, what, *others = given
        run(Path(place), what, others)
