"""What each rank does in tests of CheckpointManager: a module of its own, as other processes import it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_programs
import torch
import torch.distributed as dist
from crashing import Mortal
from flush_stores import Killing, children
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import loaderkit
from loaderkit.checkpoint import RngState
from loaderkit.connectors.base import writes_of
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import CheckpointError, ConfigError, ConnectorError, PeerError
from loaderkit.ranks.store import default_store


def training_state(rank: int, num_ranks: int, *, sharded: bool) -> dict[str, Any]:
    """A model, the same on all ranks or sharded over them, its optimizer, and what each rank has for itself."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(12, 31), torch.nn.Linear(31, 5), torch.nn.Linear(5, 1))
    if sharded:
        mesh = init_device_mesh("cpu", (num_ranks,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    return {"model": model, "optimizer": optimizer, "rng": RngState(), "note": "mine", "total": torch.zeros(3)}


def train_step(state: dict[str, Any], step: int) -> float:
    """One step on the same data on every rank; the loss."""
    data = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
    loss = state["model"](data).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["total"] += step
    dist.barrier()  # so that no rank is a step ahead, as with gradients that are added up
    number: float = loss.item()
    return number


def run(rank: int, num_ranks: int, folder: Path, name: str, sharded: bool, first: int, last: int) -> None:
    """Train from step `first`, or from what is restored, to `last`, and save each third step; write the losses and a draw."""
    rank_programs.begin(rank, num_ranks, folder, f"store-{name}")
    state = training_state(rank, num_ranks, sharded=sharded)
    with loaderkit.CheckpointManager(folder / "run", every=3, timeout_s=60.0) as checkpoints:
        step = checkpoints.restore(state) or 0
        assert step == first, (step, first)
        drawn = torch.rand(4).tolist() if step else []
        losses = {}
        while step < last:
            step += 1
            losses[step] = train_step(state, step)
            checkpoints.save(step, state)
    said = {"losses": losses, "drawn": drawn, "total": state["total"].tolist(), "steps": checkpoints.all_steps()}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(said | {"next": torch.rand(4).tolist()}))
    dist.destroy_process_group()


def flush_in_processes(rank: int, num_ranks: int, folder: Path) -> None:
    """Two steps by threads and by processes; the process of rank 1 is killed in the third step, and all save the fourth."""
    rank_programs.begin_by_address(rank, num_ranks, folder, "store")
    state = training_state(rank, num_ranks, sharded=True)
    train_step(state, 1)
    for flush in ("thread", "process"):
        flag = folder / f"kill-{flush}-{rank}"
        store = Mortal(FileConnector(folder / flush), Killing(0, flag, is_before=True))
        checkpoints = loaderkit.CheckpointManager("store://", flush=flush, connectors={"store": store}, timeout_s=60.0)
        checkpoints.save(1, state)
        checkpoints.save(2, state, wait=True)
    if rank == 1:
        flag.touch()
    checkpoints.save(3, state)
    message = message_of(checkpoints.wait_until_finished)
    steps = checkpoints.all_steps()
    checkpoints.save(4, state)
    checkpoints.close()
    (folder / f"flushed-{rank}.json").write_text(json.dumps([message, steps, checkpoints.all_steps(), children()]))
    dist.destroy_process_group()


def flush_without_address(rank: int, num_ranks: int, folder: Path) -> None:
    """The store of torch.distributed is a file, to which no process of the ranks' connects."""
    rank_programs.begin(rank, num_ranks, folder, "store")
    message = message_of(lambda: loaderkit.CheckpointManager(folder / "run", flush="process"))
    (folder / f"refused-{rank}.json").write_text(json.dumps(message))
    dist.destroy_process_group()


def stop_on_notice(rank: int, num_ranks: int, folder: Path, victim: int, at_step: int, every: int) -> None:
    """Train until a notice, which rank `victim` gets in the middle of a step; exit with 0."""
    rank_programs.begin(rank, num_ranks, folder, "store")
    state = training_state(rank, num_ranks, sharded=False)
    notice = {"signals": ["SIGTERM"]}
    with loaderkit.CheckpointManager(folder / "run", every=every, notice=notice, timeout_s=60.0) as checkpoints:
        step = checkpoints.restore(state) or 0
        first = step
        while True:
            step += 1
            if rank == victim and step == first + at_step:
                os.kill(os.getpid(), signal.SIGTERM)
            train_step(state, step)
            checkpoints.save(step, state)
            if checkpoints.reached_preemption(step):
                break
    (folder / f"stopped-{rank}.json").write_text(json.dumps([first, step, checkpoints.all_steps()]))
    dist.destroy_process_group()


class Full(FileConnector):
    """A full disk, as soon as `is_full`."""

    is_full = False

    def writes(self) -> Any:
        outer, inner = self, writes_of(FileConnector(self.describe("")))

        class Failing:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            def create(self, key: str, size: int) -> Any:
                if outer.is_full:
                    raise ConnectorError("No space left on device")
                return inner.create(key, size)

        return Failing()


def message_of(call: Callable[[], object]) -> str:
    """The type and text of the error that a call raises; "" for none."""
    try:
        call()
    except (ConnectorError, CheckpointError, ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail_on_one(rank: int, num_ranks: int, folder: Path) -> None:
    """Rank 1 cannot write the second checkpoint: every rank hears of it, and the first stands; a third is saved by all."""
    rank_programs.begin(rank, num_ranks, folder, "store")
    store = Full(folder / "run")
    state = training_state(rank, num_ranks, sharded=True)
    with loaderkit.CheckpointManager("store://", connectors={"store": store}, timeout_s=60.0) as checkpoints:
        checkpoints.save(1, state, wait=True)
        store.is_full = rank == 1
        checkpoints.save(2, state)
        message = message_of(checkpoints.wait_until_finished)
        store.is_full = False
        steps = checkpoints.all_steps()
        checkpoints.save(3, state)
    (folder / f"failed-{rank}.json").write_text(json.dumps([message, steps, checkpoints.all_steps()]))
    dist.destroy_process_group()


def die_while_saving(rank: int, num_ranks: int, folder: Path) -> None:
    """Rank 1 is killed when it is to write: rank 0 says so, and the checkpoint before stands."""
    rank_programs.begin(rank, num_ranks, folder, "store")

    class Deadly(FileConnector):
        is_deadly = False

        def writes(self) -> Any:
            if self.is_deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().writes()

    store = Deadly(folder / "run")
    state = training_state(rank, num_ranks, sharded=True)
    checkpoints = loaderkit.CheckpointManager("store://", connectors={"store": store}, timeout_s=3.0)
    checkpoints.save(1, state, wait=True)
    store.is_deadly = rank == 1
    checkpoints.save(2, state)
    message = message_of(checkpoints.close)
    (folder / f"survived-{rank}.json").write_text(json.dumps([message, checkpoints.all_steps()]))
    os._exit(0)


class Unreachable(FileConnector):
    """A store that cannot be written to, as soon as `is_gone`."""

    is_gone = False

    def writes(self) -> Any:
        if self.is_gone:
            raise ConnectorError("no route to the store")
        return super().writes()


def upload(rank: int, num_ranks: int, folder: Path) -> None:
    """Two ranks save into one local directory; rank 0 uploads, all wait for it, and hear when it fails; then one restores what
    is damaged in the local directory."""
    rank_programs.begin(rank, num_ranks, folder, "store")
    far = Unreachable(folder / "far")
    state = training_state(rank, num_ranks, sharded=True)
    messages = []
    local, stores = folder / "near", {"far": far}
    checkpoints = loaderkit.CheckpointManager("far://", local=local, connectors=stores, timeout_s=60.0)
    checkpoints.save(1, state)
    checkpoints.wait_until_finished()
    whole = sorted(path.name for path in (folder / "far").glob("step-*"))
    far.is_gone = True
    checkpoints.save(2, state)
    messages.append(message_of(checkpoints.wait_until_finished))
    far.is_gone = False
    dist.barrier()
    if rank == 0:
        (path,) = (local / "step-0000000002").glob("__1_*.distcp")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
    dist.barrier()
    newest = checkpoints.restore(state)
    messages.append(message_of(checkpoints.close))
    said = [whole, messages, newest, checkpoints.all_steps(), checkpoints.stats().get("num_uploaded")]
    (folder / f"uploaded-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def local_of_its_own(rank: int, num_ranks: int, folder: Path) -> None:
    """Each rank has a local directory of its own, as on machines of their own."""
    rank_programs.begin(rank, num_ranks, folder, "store")

    def make() -> None:
        loaderkit.CheckpointManager(folder / "far", local=folder / f"near-{rank}", timeout_s=60.0)

    try:
        make()
        message = ""
    except ConfigError as error:
        message = str(error)
    (folder / f"refused-{rank}.json").write_text(json.dumps(message))
    dist.destroy_process_group()


class Waiting(FileConnector):
    """Files that are not written before `gate` is set."""

    def __init__(self, root: Path, gate: threading.Event) -> None:
        super().__init__(root)
        self.gate = gate

    def writes(self) -> Any:
        self.gate.wait(60.0)
        return super().writes()


def skip_when_busy(rank: int, num_ranks: int, folder: Path) -> None:
    """Save three steps; the next one is asked for while each is being written, too, which all leave out."""
    rank_programs.begin(rank, num_ranks, folder, "store")
    gate = threading.Event()
    gate.set()
    store = Waiting(folder / "run", gate)
    state = training_state(rank, num_ranks, sharded=True)
    found: list[Any] = []
    with loaderkit.CheckpointManager(
        "store://", when_busy="skip", connectors={"store": store}, timeout_s=60.0
    ) as checkpoints:
        checkpoints.save(0, state, force=True, wait=True)
        for step in (1, 2, 3):
            if rank == 0 or step != 2:  # rank 0 decides
                gate.clear()
            saving = checkpoints.save(step, state)
            assert saving is not None
            found.append(checkpoints.save(step + 1, state) is None)
            dist.barrier()
            gate.set()
            saving.wait()
            dist.barrier()
            found.append(default_store().num_keys())
            dist.barrier()
        found.append(checkpoints.stats()["num_skipped"])
    (folder / f"skipped-{rank}.json").write_text(json.dumps([found, checkpoints.all_steps()]))
    dist.destroy_process_group()


def leave_before_a_restore(rank: int, num_ranks: int, folder: Path, victim: int) -> None:
    """The victim raises in the block and lives on, and the other restores: no collective may wait for it."""
    rank_programs.begin(rank, num_ranks, folder, "store")
    state = training_state(rank, num_ranks, sharded=True)
    store, message = default_store(), ""
    try:
        with loaderkit.CheckpointManager(folder / "run", timeout_s=1e6) as checkpoints:
            checkpoints.save(1, state, wait=True)
            if rank == victim:
                raise ZeroDivisionError("the loss is nan")
            checkpoints.restore(state)
    except (CheckpointError, PeerError, ZeroDivisionError) as error:
        message = f"{type(error).__name__}: {error}"
    (folder / f"left-{rank}.json").write_text(json.dumps(message))
    if rank == victim:
        store.wait(["restored"])
    else:
        store.set("restored", "")
    os._exit(0)


def leave_by_an_error(rank: int, num_ranks: int, folder: Path, victim: int, flush: str, local: bool) -> None:
    """The victim raises in the block after step 1, and the other saves step 2: it hears of that without waiting."""
    begin = rank_programs.begin_by_address if flush == "process" else rank_programs.begin
    begin(rank, num_ranks, folder, "store")
    run = folder / "run"
    state = training_state(rank, num_ranks, sharded=True)
    message = ""
    try:
        with loaderkit.CheckpointManager(
            run / "to", local=run / "local" if local else None, flush=flush, timeout_s=1e6
        ) as checkpoints:
            checkpoints.save(1, state)
            if rank == victim:
                raise ZeroDivisionError("the loss is nan")
            checkpoints.save(2, state)
    except (CheckpointError, PeerError, ZeroDivisionError) as error:
        message = f"{type(error).__name__}: {error}"
    said = [message, sorted(path.name for path in (run / "to").glob("step-*"))]
    (folder / f"left-{rank}.json").write_text(json.dumps(said))
    os._exit(0)


def refuse_fsdp1(rank: int, num_ranks: int, folder: Path, use_orig_params: bool) -> None:
    """The optimizer of a model under FSDP1 is refused; the object of the recipe gives all of it, on a new model, too."""
    rank_programs.begin(rank, num_ranks, folder, "store")

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 1))
        sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        return sharded, torch.optim.AdamW(sharded.parameters())

    class Whole:
        options = StateDictOptions(full_state_dict=True)

        def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
            self.model, self.optimizer = model, optimizer

        def state_dict(self) -> dict[str, Any]:
            state: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer, options=self.options)
            return state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)

    def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return [optimizer.state[param]["exp_avg"] for param in params if param in optimizer.state]

    model, optimizer = made(0)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    sharded = get_optimizer_state_dict(model, optimizer)
    with loaderkit.CheckpointManager(folder / "run", timeout_s=60.0) as checkpoints:
        messages = [
            message_of(lambda: checkpoints.save(1, {"model": model, "optimizer": optimizer})),
            message_of(lambda: checkpoints.save(2, {"optimizer": sharded})),
        ]
        dist.barrier()
    with loaderkit.CheckpointManager(folder / "run", timeout_s=60.0) as checkpoints:
        checkpoints.save(3, {"model": model, "optimizer": Whole(model, optimizer)}, wait=True)
        other_model, other = made(1)
        step = checkpoints.restore({"model": other_model, "optimizer": Whole(other_model, other)})
    is_same = all(map(torch.equal, moments(optimizer), moments(other))) and len(moments(other)) > 0
    (folder / f"refused-{rank}.json").write_text(json.dumps([messages, step, is_same]))
    dist.destroy_process_group()
