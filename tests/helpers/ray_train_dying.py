"""examples/ray_train.py, whose worker of rank 1 is killed after one step, and whose node is taken away after another one.

python ray_train_dying.py FOLDER KILLED_AT DRAINED_AT ARGUMENTS...       # 0: never
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
folder, killed_at, drained_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
assert spec is not None
assert spec.loader is not None
example: Any = importlib.util.module_from_spec(spec)
sys.modules["ray_train"] = example
spec.loader.exec_module(example)
cloudpickle: Any = ray.cloudpickle
cloudpickle.register_pickle_by_value(example)
train = example.train


def is_first(what: str) -> bool:
    """True once in all attempts."""
    try:
        (folder / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def drain(attempt: int) -> None:
    """Announce that this worker's node will go, note it, and wait until Ray Train has heard of it."""
    import ray._private.worker as ray_worker
    import ray.core.generated.autoscaler_pb2 as messages
    from ray.train.v2._internal.execution.context import get_train_context

    node = ray.get_runtime_context().get_node_id()
    client: Any = getattr(ray_worker.global_worker, "gcs_client")  # noqa: B009 - what mypy does not know of
    reason = getattr(messages, "DrainNodeReason").Value("DRAIN_NODE_REASON_PREEMPTION")  # noqa: B009
    deadline_ms = int((time.time() + 600) * 1000)
    accepted, why = client.drain_node(node, reason, "taken away", deadline_ms)
    assert accepted, why
    (folder / "drained").write_text(f"{attempt} {node}")
    while get_train_context().preemption_context.preemption_info is None:
        time.sleep(0.05)


def train_and_die(config: dict[str, Any]) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    rank = ray.train.get_context().get_world_rank()
    attempt = len(list(folder.glob(f"attempt-*-{rank}")))
    (folder / f"attempt-{attempt}-{rank}").write_text(ray.get_runtime_context().get_node_id())

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        step = int(next(iter(optimizer.state.values()))["step"])
        if rank == 1 and step == killed_at and is_first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == drained_at and is_first("drained"):
            drain(attempt)

    register_optimizer_step_post_hook(after_step)
    return train(config)


example.train = train_and_die
sys.argv[1:] = sys.argv[4:]
example.main()
