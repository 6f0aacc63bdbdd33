"""What each rank does in tests of saving: a module of its own, as other processes import it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crashing import Clock, Mortal
from rank_programs import assert_equal, begin, state_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from loaderkit.checkpoint import StreamReader, StreamWriter
from loaderkit.connectors.file import FileConnector


def save_streamed(rank: int, num_ranks: int, folder: Path, kind: str) -> None:
    """By our writer, and by torch's."""
    begin(rank, num_ranks, folder, "saving")
    state = state_of(num_ranks, 1, kind, is_blank=False)
    writer = StreamWriter(folder / "step-7")
    save(state, storage_writer=writer)
    save(state, checkpoint_id=folder / "torch")
    assert writer.stats is not None
    assert sorted(writer.stats["ranks"]) == (list(range(num_ranks)) if rank == 0 else [rank])
    dist.destroy_process_group()


def load_streamed(rank: int, num_ranks: int, folder: Path, kind: str) -> None:
    """Torch's own reader and ours give the same from what our writer wrote, and from what torch's did."""
    begin(rank, num_ranks, folder, f"loading-{num_ranks}")
    states = []
    for reader in (
        FileSystemReader(folder / "torch"),
        FileSystemReader(folder / "step-7"),
        StreamReader(folder / "step-7", verify=True),
        StreamReader(folder / "step-7", share=False),
    ):
        states.append(state_of(num_ranks, 1, kind, is_blank=True))
        load(states[-1], storage_reader=reader)
        assert_equal(states[-1], states[0])
    if kind == "tensors":  # gradients are not the same to the last bit on every number of ranks
        assert_equal(states[0], state_of(num_ranks, 1, kind, is_blank=False))
    dist.destroy_process_group()


def rows(number: int, num_ranks: int) -> dict[str, Any]:
    """A sharded tensor, one that is whole on every rank, and a value."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    whole = torch.arange(40_000.0).reshape(400, 100) + number
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "same": torch.full((50,), float(number)),
        "step": number,
    }


def assert_loaded(path: Path, number: int, num_ranks: int) -> None:
    """Plain `dcp.load` gives that state."""
    wanted, state = rows(number, num_ranks), rows(-1, num_ranks)
    load(state, checkpoint_id=path)
    assert state["step"] == number
    assert torch.equal(state["same"], wanted["same"])
    assert isinstance(state["rows"], DTensor)
    assert torch.equal(state["rows"].to_local(), wanted["rows"].to_local())


def save_many(rank: int, num_ranks: int, folder: Path) -> None:
    """With plans that are kept and not, in the same directory again, synchronously and in a thread."""
    begin(rank, num_ranks, folder, "many")
    writer = StreamWriter(folder / "none")
    for number, is_async in enumerate((False, False, True, True, False)):
        path = folder / f"step-{number % 2}"
        planner = DefaultSavePlanner(enable_plan_caching=number > 0)
        if is_async:
            future: Any = async_save(
                rows(number, num_ranks), checkpoint_id=path, storage_writer=writer, planner=planner
            )
            future.result()
        else:
            save(rows(number, num_ranks), storage_writer=StreamWriter(path), planner=planner)
        dist.barrier()
        assert_loaded(path, number, num_ranks)
    dist.destroy_process_group()


def save_in_a_process(rank: int, num_ranks: int, folder: Path) -> None:
    begin(rank, num_ranks, folder, "process")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    for number in range(2):
        path = folder / f"step-{number}"
        state = rows(number, num_ranks)
        future: Any = async_save(
            state, storage_writer=StreamWriter(path), async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        state["same"].fill_(-1)
        future.result()
        assert_loaded(path, number, num_ranks)
    dist.destroy_process_group()


class Fatal(Clock):
    """Ends with what is given, at the first operation of that name."""

    def __init__(self, name: str, end: Callable[[], Any]) -> None:
        super().__init__()
        self._name, self._end = name, end

    def run(self, name: str, operation: Callable[[], Any]) -> Any:
        if name == self._name:
            self._end()
        return super().run(name, operation)


def fail_on_one(rank: int, num_ranks: int, folder: Path, failing: int, how: str) -> None:
    """Rank `failing` fails, or is killed, while it writes step 2; then, if it failed, all save again."""
    begin(rank, num_ranks, folder, f"failing-{how}-{failing}")

    def end() -> None:
        if how == "killed":
            os._exit(9)
        raise OSError("the disk is gone")

    save(rows(1, num_ranks), storage_writer=StreamWriter(folder / "step-1"))
    connector = Mortal(FileConnector(folder), Fatal("write", end if rank == failing else int))
    try:
        save(rows(2, num_ranks), storage_writer=StreamWriter("given://step-2", connectors={"given": connector}))
    except CheckpointException as error:
        if list(error.failures) != [failing]:
            raise
    except RuntimeError:
        assert how == "killed"
        os._exit(0)
    assert how == "fails"
    assert_loaded(folder / "step-1", 1, num_ranks)
    save(rows(3, num_ranks), storage_writer=StreamWriter(folder / "step-3"))
    assert_loaded(folder / "step-3", 3, num_ranks)
    with suppress(RuntimeError):
        dist.destroy_process_group()
