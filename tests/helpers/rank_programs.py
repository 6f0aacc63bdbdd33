"""What each rank does in tests of sharing and resharding: a module of its own, as other processes import it."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # brought in by saving; here, so that it is imported once for all ranks
import torch.distributed as dist
from fake_gpus import FakeGpus
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import loaderkit
from loaderkit.checkpoint import StreamReader
from loaderkit.connectors.file import FileConnector

_PATIENCE_S = 120.0


def run_ranks(
    function: Callable[..., None],
    num_ranks: int,
    *args: Any,
    patience_s: float = _PATIENCE_S,
    die_together: bool = False,
) -> list[int | None]:
    """Run `function(rank, num_ranks, *args)` in as many processes; their exit codes. With `die_together` the first that fails
    takes the others with it, as torchrun does."""
    context = _forkserver()
    processes = [context.Process(target=function, args=(rank, num_ranks, *args)) for rank in range(num_ranks)]
    try:
        for process in processes:
            process.start()
        deadline_s = time.monotonic() + patience_s
        running = list(processes)
        while die_together and running and not any(process.exitcode for process in processes):
            connection.wait([process.sentinel for process in running], max(0.0, deadline_s - time.monotonic()))
            running = [process for process in running if process.is_alive()]
        for process in running if die_together else []:
            process.kill()
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _forkserver() -> ForkServerContext:
    """Its server imports this module once for all ranks: a rank costs 50 ms then, and seconds otherwise.

    The server does not get `sys.path`, and leaves out a module that it does not find without a word: hence PYTHONPATH.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_programs"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(folder for folder in sys.path if folder)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def begin(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """Join the group; `name` is that of its store, which is a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=num_ranks)


def begin_by_address(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """Join the group; its store has an address, as torchrun's has, which is found by the file `name`."""
    torch.set_num_threads(1)
    meeting: Any = dist.FileStore(str(folder / name), num_ranks)  # type: ignore[attr-defined]
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    if rank == 0:
        store = tcp("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = tcp("127.0.0.1", int(meeting.get("port")), num_ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


class Counted(FileConnector):
    """Counts the bytes that are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.num_bytes = 0
        self._lock = threading.Lock()

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        with self._lock:
            self.num_bytes += len(buffer)


def whole(scale: int = 1) -> dict[str, torch.Tensor]:
    """The state as one process would have it."""
    generator = torch.Generator().manual_seed(1)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "rows": tensor(30, 17),
        "columns": tensor(9, 41),
        "large": tensor(600 * scale, 701),
        "wide": tensor(301, 400 * scale),
        "same": tensor(5),
        "same_large": tensor(200 * scale, 700),
        "half": tensor(64, 64).bfloat16(),
        "scalar": torch.tensor(3.5),
        "uneven": tensor(3, 2),
        **{f"small.{n}": tensor(10 + n) for n in range(30)},
    }


PLACEMENTS: dict[str, list[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "large": [Shard(0)],
    "wide": [Shard(1)],
    "half": [Shard(0)],
    "uneven": [Shard(0)],  # fewer rows than there may be ranks
}


def sharded(state: dict[str, torch.Tensor], num_ranks: int) -> dict[str, torch.Tensor]:
    """As DTensors; those that are whole on every rank in both ways, as such and as plain tensors."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        is_plain = name.startswith("small.") or name == "scalar"
        tensors[name] = tensor if is_plain else distribute_tensor(tensor, mesh, PLACEMENTS.get(name, [Replicate()]))
    return tensors


def fsdp(num_ranks: int, scale: int, *, is_blank: bool) -> dict[str, torch.Tensor]:
    """What FSDP2 shards: rows of every parameter; the optimizer's moments with them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(701, 301 * scale), torch.nn.ReLU(), torch.nn.Linear(301 * scale, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(2, 701)).sum().backward()
    optimizer.step()
    state = dict(model.state_dict())
    moments: Any = get_optimizer_state_dict(model, optimizer)["state"]
    for name, value in moments.items():
        state |= {f"{name}.{key}": tensor for key, tensor in value.items()}
    if is_blank:
        state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return {name: tensor.detach() for name, tensor in state.items()}


def state_of(num_ranks: int, scale: int, kind: str, *, is_blank: bool) -> dict[str, Any]:
    if kind == "fsdp":
        return {"model": fsdp(num_ranks, scale, is_blank=is_blank), "step": 7 - 7 * is_blank, "names": []}
    tensors = {name: torch.zeros_like(tensor) if is_blank else tensor for name, tensor in whole(scale).items()}
    return {"model": sharded(tensors, num_ranks), "step": 0 if is_blank else 7, "names": [] if is_blank else ["a", "b"]}


def save_sharded(rank: int, num_ranks: int, folder: Path, scale: int, kind: str) -> None:
    begin(rank, num_ranks, folder, "saving")
    save(state_of(num_ranks, scale, kind, is_blank=False), checkpoint_id=folder / "step-7")
    dist.destroy_process_group()


def assert_equal(loaded: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert (loaded["step"], loaded["names"]) == (wanted["step"], wanted["names"])
    for name, tensor in loaded["model"].items():
        assert torch.equal(bytes_in(tensor), bytes_in(wanted["model"][name])), name


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """Of this rank's part of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.reshape(-1).view(torch.uint8)


def load_sharded(rank: int, num_ranks: int, folder: Path, scale: int, kind: str) -> None:
    """With sharing and without: what torch's own reader gives."""
    begin(rank, num_ranks, folder, f"loading-{num_ranks}")
    wanted = state_of(num_ranks, scale, kind, is_blank=True)
    load(wanted, checkpoint_id=folder / "step-7")
    if kind == "tensors":  # gradients are not the same to the last bit on every number of ranks
        assert_equal(wanted, state_of(num_ranks, scale, kind, is_blank=False))
    for share, memory in ((True, "64MiB"), (False, "64MiB"), (True, f"{num_ranks * 4}MiB")):
        state = state_of(num_ranks, scale, kind, is_blank=True)
        counted = Counted(folder)
        reader = StreamReader("counted://step-7", share=share, memory=memory, connectors={"counted": counted})
        load(state, storage_reader=reader)
        assert_equal(state, wanted)
        if share and memory == "64MiB":
            (folder / f"loaded-{num_ranks}-{rank}").write_text(json.dumps([counted.num_bytes, reader.stats]))
    dist.destroy_process_group()


def restore_all(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """Every rank gets everything, new and in place, in whatever layout it likes."""
    begin(rank, num_ranks, folder, "restoring")
    counted = Counted(folder)
    restored = loaderkit.restore(
        f"counted://{name}", rank=rank, world_size=num_ranks, memory="64MiB", connectors={"counted": counted}
    )
    alone = loaderkit.restore(folder / name)
    assert restored.keys() == alone.keys()
    into: dict[str, Any] = {}
    for key, value in alone.items():
        if not isinstance(value, torch.Tensor):
            assert restored[key] == value
            into[key] = None
            continue
        assert torch.equal(restored[key], value), key
        # Odd ranks fill transposed tensors of another type.
        blank = torch.zeros_like(value)
        into[key] = (
            blank.double().t().contiguous().t()
            if rank % 2 and blank.dim() == 2 and blank.is_floating_point()
            else blank
        )
    loaderkit.restore(folder / name, into, rank=rank, world_size=num_ranks, dtype="target", memory="64MiB")
    for key, value in alone.items():
        same = (
            torch.equal(into[key], value.to(into[key].dtype)) if isinstance(value, torch.Tensor) else into[key] == value
        )
        assert same, key
    (folder / f"restored-{rank}").write_text(json.dumps(counted.num_bytes))
    dist.destroy_process_group()


class Faulty(FileConnector):
    """A disk that fails, kills the process or never answers, once `num_good` large reads are done."""

    def __init__(self, root: Path, what: str, num_good: int = 3) -> None:
        super().__init__(root)
        self._what = what
        self._num_left = num_good
        self.hangs = threading.Event()

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        self._num_left -= len(buffer) > 2**18
        if self._num_left < 0:
            if self._what == "dies":
                os.kill(os.getpid(), 9)
            if self._what == "hangs":
                self.hangs.wait()
            raise loaderkit.errors.ConnectorError("the disk is broken")
        super().read_into(key, start, buffer, etag=etag)


def fail_in_the_middle(rank: int, num_ranks: int, folder: Path, how: str, timeout_s: float) -> None:
    """Rank 1 fails; the others write down what they were told."""
    begin(rank, num_ranks, folder, f"failing-{how}")
    connector = Faulty(folder, how) if rank == 1 else FileConnector(folder)
    try:
        loaderkit.restore(
            "given://large.safetensors", {"w": torch.zeros(2**22), "v": torch.zeros(2**22)},
            rank=rank, world_size=num_ranks, memory="8MiB", connectors={"given": connector}, timeout_s=timeout_s,
        )  # fmt: skip
    except loaderkit.errors.LoaderkitError as error:
        told = [type(error).__name__, str(error), getattr(error, "ranks", None), getattr(error, "touched", None)]
        (folder / f"{how}-{rank}").write_text(json.dumps(told))
    if rank == 1 or how == "dies":
        os._exit(0)  # what hangs hangs; and there is no group any more that could be left
    with suppress(RuntimeError):
        dist.destroy_process_group()


def refuse_values(rank: int, num_ranks: int, folder: Path, kind: str) -> None:
    """Write down how restoring ends and what has been written to, where a value is one that nothing makes.

    With "one" only the last rank wants that value, and all want the tensor.
    """
    begin(rank, num_ranks, folder, f"refusing-{kind}")
    into: dict[str, Any] = {"w": torch.zeros(2**20)}
    if kind != "one" or rank == num_ranks - 1:
        into["k"] = 0
    caught: BaseException | None = None
    try:
        if kind in {"dcp", "torch"}:
            loaderkit.restore(folder / kind, into, rank=rank, world_size=num_ranks)
        else:
            load(into, storage_reader=StreamReader(folder / "dcp"))
    except CheckpointException as error:
        caught = error.failures[rank][0] if rank in error.failures else None
    except (loaderkit.errors.CheckpointError, loaderkit.errors.PeerError) as error:
        caught = error
    told = [type(caught).__name__, str(caught), getattr(caught, "touched", None), bool(into["w"].any())]
    (folder / f"refused-{kind}-{rank}").write_text(json.dumps(told))
    with suppress(RuntimeError):
        dist.destroy_process_group()


def restore_beside_a_log(rank: int, num_ranks: int, folder: Path) -> None:
    """Each rank sees the log at another length."""
    begin(rank, num_ranks, folder, "logging")
    (folder / f"{rank}" / "train.log").write_text("step\n" * rank)
    restored = loaderkit.restore(folder / f"{rank}", rank=rank, world_size=num_ranks)
    assert restored["a"].eq(1).all()
    dist.destroy_process_group()


def restore_with_settings(rank: int, num_ranks: int, folder: Path) -> None:
    """Ranks honour `concurrency`, say which object is slow, and say of the memory what the user has to give."""
    begin(rank, num_ranks, folder, "settings")
    told: list[Any] = []
    threads: set[str] = set()

    class Watched(FileConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            if len(buffer) > 2**18:
                threads.add(threading.current_thread().name)
            super().read_into(key, start, buffer, etag=etag)

    def restore(memory: str) -> None:
        loaderkit.restore(
            "watched://x.safetensors", rank=rank, world_size=num_ranks, memory=memory, concurrency=3,
            progress=told.append, connectors={"watched": Watched(folder)},
        )  # fmt: skip

    restore("2GiB")
    assert told[-1].slowest_object == str(folder / "x.safetensors")
    assert told[-1].num_bytes == told[-1].total_bytes == 2**23
    assert 1 <= len(threads) <= 3
    said = ""
    try:
        restore("1MiB")
    except loaderkit.errors.ConfigError as error:
        said = str(error)
    needed = 2 * 2 * num_ranks * 3 * 64 * 2**10  # two buffers a worker; half of the memory is for what is received
    assert f"the least is {needed // 2**10} KiB with 3 workers on every rank" in said, said
    restore(f"{needed}")
    dist.destroy_process_group()


def load_in_a_group(rank: int, num_ranks: int, folder: Path) -> None:
    """All ranks but the first are a group of their own, and share."""
    begin(rank, num_ranks, folder, "grouping")
    group = dist.new_group([*range(1, num_ranks)])
    if rank:
        state = {"a": torch.zeros(2**20), "b": torch.zeros(2**20)}
        reader = StreamReader(folder / "x.safetensors", process_group=group)
        load(state, storage_reader=reader, process_group=group)
        assert all(tensor.eq(1).all() for tensor in state.values())
        assert reader.stats is not None
        (folder / f"grouped-{rank}").write_text(json.dumps(reader.stats["shared"]))
        wrong = StreamReader(folder / "x.safetensors")
        try:
            load(state, storage_reader=wrong, process_group=group)
        except CheckpointException as error:
            assert "the same process_group" in str(error)  # noqa: PT017 - not in pytest's process
        else:
            raise AssertionError("plans of another group than StreamReader's were accepted")
    dist.barrier()
    dist.destroy_process_group()


def queue_work(into: Mapping[str, torch.Tensor]) -> None:
    """Keep the current stream of a GPU busy for a while, and then write to all of these tensors."""
    large = torch.ones(4096, 4096, device="cuda")
    for _ in range(30):
        large = large @ large
    for tensor in into.values():
        tensor.fill_(7)


def restore_over_queued_work(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """All ranks on one GPU, each with a stream of its own that still has to write to what is restored."""
    begin(rank, num_ranks, folder, "queued")
    wanted = loaderkit.restore(folder / name)
    for kind in ("restore", "load"):
        into = {key: torch.zeros_like(tensor, device="cuda") for key, tensor in wanted.items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            queue_work(into)
            if kind == "restore":
                loaderkit.restore(folder / name, into, rank=rank, world_size=num_ranks)
            else:
                load(dict(into), storage_reader=StreamReader(folder / name))
        torch.cuda.synchronize()
        assert all(torch.equal(into[key].cpu(), tensor) for key, tensor in wanted.items()), kind
    dist.destroy_process_group()


class Bad(FileConnector):
    """A disk that cannot read large ranges from some byte on."""

    def __init__(self, root: Path, start: int) -> None:
        super().__init__(root)
        self._start = start

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        if start >= self._start and len(buffer) > 2**18:
            raise loaderkit.errors.ConnectorError("the disk is broken")
        super().read_into(key, start, buffer, etag=etag)


def fail_in_own(rank: int, num_ranks: int, folder: Path) -> None:
    """Rank 1 cannot read what it alone needs, once what both need is there."""
    begin(rank, num_ranks, folder, "own")
    reader = StreamReader("bad://x.safetensors", connectors={"bad": Bad(folder, 2**22)})
    state = {"a": torch.zeros(2**20)} | ({"b": torch.zeros(2**20)} if rank == 1 else {})
    try:
        load(state, storage_reader=reader)
    except CheckpointException as error:
        own: Any = error.failures[1][0]
        (folder / f"own-{rank}").write_text(json.dumps([sorted(error.failures), str(own), own.touched]))
    with suppress(RuntimeError):
        dist.destroy_process_group()


def die_in_load(rank: int, num_ranks: int, folder: Path) -> None:
    """Rank 1 dies within dcp.load; the others write down what they find in the log, and how it ended."""
    begin(rank, num_ranks, folder, "dying")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("loaderkit").addHandler(handler)
    connector = Faulty(folder, "dies") if rank == 1 else FileConnector(folder)
    reader = StreamReader("given://large.safetensors", memory="8MiB", connectors={"given": connector})
    try:
        load({"w": torch.zeros(2**22), "v": torch.zeros(2**22)}, storage_reader=reader)
    except Exception as error:
        (folder / f"died-{rank}").write_text(json.dumps([said, repr(error)]))
    os._exit(0)


def restore_to_several_gpus(rank: int, num_ranks: int, folder: Path, name: str) -> None:
    """Each rank has tensors on GPUs 1 and 2."""
    begin(rank, num_ranks, folder, "gpus")
    wanted = loaderkit.restore(folder / name)
    with FakeGpus().installed() as gpus:
        into = {key: gpus.put(torch.zeros_like(one), 1 + n % 2) for n, (key, one) in enumerate(wanted.items())}
        loaderkit.restore(folder / name, into, rank=rank, world_size=num_ranks, memory="1MiB", concurrency=1)
        gpus.finish()
        assert all(torch.equal(into[key], tensor) for key, tensor in wanted.items())
        assert {device.index for device, _, _ in gpus.copies} == gpus.contexts == {1, 2}
        assert any(pinned for _, _, pinned in gpus.copies)
        assert gpus.registered == {}
    dist.destroy_process_group()
