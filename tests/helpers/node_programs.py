"""What each rank does in tests of nodes with local folders of their own: a module of its own, as other processes import it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rank_programs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import loaderkit
from loaderkit.checkpoint.nodes.replication import Replication
from loaderkit.connectors.base import ObjectInfo
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import LoaderkitError, UnreachableError


class Far(FileConnector):
    """The store that lasts: it notes what is asked for; with `is_away` it answers nothing."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []
        self.is_away = False

    def _ask(self, what: str) -> None:
        if not threading.current_thread().name.startswith(("loaderkit-upload", "loaderkit-blocks")):
            self.asked.append(what)  # by others than what uploads
        if self.is_away:
            raise UnreachableError("no route to the store")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._ask("list")
        return super().list(prefix)

    def stat(self, key: str) -> ObjectInfo:
        self._ask("stat")
        return super().stat(key)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self._ask("read")
        super().read_into(key, start, buffer, etag=etag)


def whole(step: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """The tensors of a step, the same for any number of ranks."""
    draw = torch.Generator().manual_seed(step)
    return {
        "wide": torch.randn(24 * scale, 331, generator=draw),
        "odd": torch.randn(7, 5, generator=draw),
        "same": torch.randn(30011, generator=draw),
    }


def state_of(num_ranks: int, step: int, scale: int = 1, *, is_blank: bool = False) -> dict[str, Any]:
    """Two tensors cut over the ranks, one that all have, and a plain value."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    tensors = {name: torch.zeros_like(one) if is_blank else one for name, one in whole(step, scale).items()}
    model: dict[str, Any] = {name: distribute_tensor(tensors[name], mesh, [Shard(0)]) for name in ("wide", "odd")}
    return {"model": model, "same": tensors["same"], "number": -1 if is_blank else step}


def check(state: dict[str, Any], step: int, scale: int = 1) -> None:
    """Fails unless it is the state of this step, to the last bit."""
    assert state["number"] == step
    expected = whole(step, scale)
    assert torch.equal(state["same"], expected["same"])
    for name, tensor in state["model"].items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name


def near(folder: Path, rank: int, ranks_a_node: int, names: list[str] | None = None) -> Path:
    number = rank // ranks_a_node
    return folder / (names[number] if names else f"near-{number}")


def save_steps(
    rank: int,
    num_ranks: int,
    folder: Path,
    ranks_a_node: int,
    steps: list[int],
    victims: list[int],
    settings: dict[str, Any],
) -> None:
    """Save steps; `victims` are killed once the last one is committed and replicated, while the next is being saved."""
    begin = rank_programs.begin_by_address if settings.get("flush") == "process" else rank_programs.begin
    begin(rank, num_ranks, folder, f"store-{steps}")
    scale = settings.pop("scale", 1)
    local = {"path": near(folder, rank, ranks_a_node), "keep": 2}
    with loaderkit.CheckpointManager(
        "far://", local=local, replicas=1, connectors={"far": Far(folder / "far")}, timeout_s=120.0, **settings
    ) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(num_ranks, step, scale), wait=True)
        checkpoints.wait_until_finished()
        stats = checkpoints.stats()
        (folder / f"saved-{rank}.json").write_text(json.dumps(stats.get("num_replicated", -1)))
        if victims:
            state = state_of(num_ranks, steps[-1] + 1, scale)
            dist.barrier()  # none is killed while another waits for its tensors
            checkpoints.save(steps[-1] + 1, state)
            if rank in victims:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)  # torchrun ends the others
    dist.destroy_process_group()


def save_until_noticed(rank: int, num_ranks: int, folder: Path, within: str, is_held: bool) -> None:
    """Save each step until a notice ends the job, and note the last. `is_held`: no replica comes to an end by itself."""
    rank_programs.begin(rank, num_ranks, folder, f"store-{within}")
    if is_held:
        Replication._copy = _hold  # type: ignore[assignment,method-assign]
    with loaderkit.CheckpointManager(
        "far://",
        local={"path": near(folder, rank, 1), "keep": 2},
        replicas=1,
        notice={"signals": ["SIGUSR1"], "within": within},
        connectors={"far": Far(folder / "far")},
        timeout_s=120.0,
    ) as checkpoints:
        checkpoints.save(1, state_of(num_ranks, 1), wait=True)
        os.kill(os.getpid(), signal.SIGUSR1)
        step = 1
        while not checkpoints.reached_preemption(step):
            step += 1
            checkpoints.save(step, state_of(num_ranks, step))
    (folder / f"noticed-{rank}.json").write_text(json.dumps([step, checkpoints.stats()["last"]["extent"]["place"]]))
    dist.destroy_process_group()


def _hold(replication: Replication, name: str) -> int:
    while not replication._closed:
        time.sleep(0.01)
    raise UnreachableError(f"{name} is held")


def restore_from(
    rank: int, num_ranks: int, folder: Path, names: list[str], name: str, is_away: bool, scale: int = 1
) -> None:
    """Restore from the folders `names`, shared out over the ranks in order; note the step, the requests to the far store during
    that, and the warnings."""
    rank_programs.begin(rank, num_ranks, folder, f"store-{name}")
    said = _warnings()
    far = Far(folder / "far")
    far.is_away = is_away
    step: int | None = None
    error = ""
    local = {"path": near(folder, rank, num_ranks // len(names), names), "keep": 2}
    checkpoints = loaderkit.CheckpointManager(
        "far://", local=local, replicas=1, connectors={"far": far}, timeout_s=120.0, keep={"last": 100}
    )
    if not is_away:
        checkpoints.wait_until_finished()
    state = state_of(num_ranks, 0, scale, is_blank=True)
    far.asked.clear()
    try:
        step = checkpoints.restore(state)
    except LoaderkitError as failure:
        error = f"{type(failure).__name__}: {failure}"
    asked = [*far.asked]
    if step is not None:
        check(state, step, scale)
    (folder / f"{name}-{rank}.json").write_text(json.dumps([step, asked, said, error]))
    dist.barrier()
    if is_away:
        os._exit(0)  # its uploads could not end
    checkpoints.close()
    dist.destroy_process_group()


def start(rank: int, num_ranks: int, folder: Path, how: str, step: int | None = None) -> None:
    """A start of a job of one process: it restores, notes the step and the warnings, and ends as `how` says."""
    said = _warnings()
    with loaderkit.CheckpointManager(folder / "run", notice={"signals": ["SIGTERM"]}) as checkpoints:
        state = {"x": torch.zeros(10)}
        restored = checkpoints.restore(state, step) if how != "first" else 0
        assert restored is not None
        (folder / "started.json").write_text(json.dumps([restored, state["x"].tolist(), said]))
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fails":
            raise ZeroDivisionError("the loss is nan")
        if how == "noticed":
            os.kill(os.getpid(), signal.SIGTERM)
        if how in ("first", "trains"):
            for number in range(restored + 1, 3 if how == "first" else restored + 2):
                checkpoints.save(number, {"x": torch.full((10,), float(number))}, wait=True)
        if how == "steps":
            checkpoints.should_save(restored)
        if how in ("steps", "trains"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            sys.exit(3)


def leave_open(folder: str, how: str) -> None:
    """A program that restores and never closes its manager."""
    checkpoints = loaderkit.CheckpointManager(folder)
    print(checkpoints.restore({"x": torch.zeros(10)}))
    if how == "fails":
        raise ZeroDivisionError("the loss is nan")


def _warnings() -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("loaderkit").addHandler(handler)
    return said


if __name__ == "__main__":
    leave_open(*sys.argv[1:])
