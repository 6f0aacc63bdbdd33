"""What `StreamWriter` writes, as plain `dcp.load`, `StreamReader` and `loaderkit.restore` read it, to the last bit."""

from __future__ import annotations

import pickle
import random
import tempfile
import threading
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import flat_states, random_tensor, same, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful
from torch.testing._internal.two_tensor import TwoTensor

import loaderkit
from loaderkit.checkpoint import StreamReader, StreamWriter, latest
from loaderkit.checkpoint.save import dcp_writer
from loaderkit.checkpoint.save.file_plan import BytesItem
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError, ConfigError, ConnectorError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
# No lists of tables and values: torch's own reader does not find what its writer makes of [0, {}].
PLAIN = st.recursive(
    SCALARS | st.lists(SCALARS, max_size=3),
    lambda inner: st.dictionaries(st.text("abc", min_size=1), inner, max_size=2),
    max_leaves=4,
)


def blank(state: Any) -> Any:
    """The same state with other values."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.zeros(state.shape, dtype=state.dtype) if isinstance(state, torch.Tensor) else 0


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(found[key], value)
        return
    assert same(found, wanted), (found, wanted)


def loaded(path: Path, state: Any, reader: Any) -> Any:
    filled = blank(state)
    load(filled, storage_reader=reader(path), no_dist=True)
    return filled


@given(flat_states(), st.dictionaries(st.text("xyz", min_size=1), PLAIN, max_size=3), st.sampled_from([1, 3]))
@settings(max_examples=num_examples(60))
def test_every_reader_gets_what_was_saved(flat: dict[str, torch.Tensor], values: dict[str, Any], workers: int) -> None:
    state = {"model": flat, "values": values}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step-1")
        save(state, storage_writer=StreamWriter(path, workers=workers), no_dist=True)
        assert_same(loaded(path, state, FileSystemReader), state)
        assert_same(loaded(path, state, StreamReader), state)
        restored = loaderkit.restore(path, verify=True)
        assert_same({name: restored[f"model.{name}"] for name in flat}, flat)


@given(st.lists(tensors(), min_size=1, max_size=4), st.sampled_from([1, 2, 5]))
@settings(max_examples=num_examples(40))
def test_tensors_of_many_parts(some: list[torch.Tensor], workers: int) -> None:
    """MemoryConnector's parts have 64 KiB: tensors end and begin in them anywhere."""
    state = {f"{n}": torch.cat([tensor.reshape(-1)] * 40_000)[: 150_001 + n] for n, tensor in enumerate(some)}
    state |= {f"{n}.t": tensor.reshape(3, -1).t() for n, tensor in state.items() if tensor.numel() % 3 == 0}
    store = MemoryConnector()
    save(state, storage_writer=StreamWriter("given://a", workers=workers, connectors={"given": store}), no_dist=True)
    assert_same(dict(loaderkit.restore("given://a", connectors={"given": store}, verify=True)), state)
    (file,) = [info.key for info in store.list("") if info.key.endswith(".distcp")]
    data = bytearray(store.stat(file).size)
    store.read_into(file, 0, memoryview(data))
    with tempfile.TemporaryDirectory() as folder:
        for info in store.list(""):
            copy = bytearray(info.size)
            store.read_into(info.key, 0, memoryview(copy))
            Path(folder, info.key.rpartition("/")[2]).write_bytes(copy)
        assert_same(loaded(Path(folder), state, FileSystemReader), state)


def test_every_archive_is_that_of_torch(tmp_path: Path) -> None:
    state = {"w": random_tensor(torch.bfloat16, (300, 301), 1), "t": torch.ones(4, 5).t(), "n": [1, 2]}
    save(state, storage_writer=StreamWriter(tmp_path / "a"), no_dist=True)
    metadata = FileSystemReader(tmp_path / "a").read_metadata()
    data = (tmp_path / "a/__0_0.distcp").read_bytes()
    for index, where in metadata.storage_data.items():
        archive = data[where.offset : where.offset + where.length]
        assert zipfile.ZipFile(BytesIO(archive)).testzip() is None
        value = torch.load(BytesIO(archive), weights_only=True)
        assert_same(value, state[index.fqn])
        if isinstance(value, torch.Tensor):
            file = BytesIO()
            torch.save(value.contiguous(), file)
            assert archive == file.getvalue()


def test_metadata_is_that_of_torch(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3, 4), "e": torch.zeros(0)}, "names": ["a"]}
    save(state, storage_writer=StreamWriter(tmp_path / "ours"), no_dist=True)
    save(state, storage_writer=FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    ours, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    assert ours.storage_data.keys() == theirs.storage_data.keys()


class Counter(Stateful):
    def __init__(self, value: int) -> None:
        self.value = value
        self.weights = torch.full((3,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_stateful_objects_modules_and_optimizers(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Counter]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(30, 40)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        return model, optimizer, Counter(seed)

    model, optimizer, counter = make(1)
    save(
        {"model": model, "optimizer": optimizer, "counter": counter},
        storage_writer=StreamWriter(tmp_path / "a"),
        no_dist=True,
    )
    model_2, optimizer_2, counter_2 = make(2)
    load({"model": model_2, "optimizer": optimizer_2, "counter": counter_2}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert_same(dict(model_2.state_dict()), dict(model.state_dict()))
    assert_same(optimizer_2.state_dict()["state"], optimizer.state_dict()["state"])
    assert counter_2.value == 1
    assert counter_2.weights.eq(1).all()


@pytest.mark.parametrize("is_async", [False, True])
def test_tied_tensors_are_written_once(is_async: bool, tmp_path: Path) -> None:
    tied = torch.randn(500, 50)
    names = [f"w{n}" for n in range(40)]
    state = {"part": tied[:20], "transposed": tied.t(), "same": tied.clone(), **dict.fromkeys(names, tied)}
    writer = StreamWriter(tmp_path / "a")
    if is_async:
        future: Any = async_save(state, storage_writer=writer, no_dist=True)
        future.result()
    else:
        save(state, storage_writer=writer, no_dist=True)
    for reader in (FileSystemReader, StreamReader):
        assert_same(loaded(tmp_path / "a", state, reader), state)
    assert_same(dict(loaderkit.restore(tmp_path / "a", verify=True)), state)
    num_bytes = (tmp_path / "a/__0_0.distcp").stat().st_size
    assert num_bytes < 5 * (tied.nbytes + 4096)  # of 40 names, 32 are one item; and three other tensors


def test_plain_values_are_kept_as_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython up to 3.12.1 ends by SIGSEGV when it collects a BytesIO in one cycle with a memoryview of it."""
    items: list[BytesItem] = []

    def keep(name: str, data: bytes) -> BytesItem:
        items.append(BytesItem(name, data))
        return items[-1]

    monkeypatch.setattr(dcp_writer, "BytesItem", keep)
    save(
        {"step": 3, "names": ["a", "b"], "sparse": torch.eye(3).to_sparse()},
        storage_writer=StreamWriter(tmp_path / "a"),
    )
    assert len(items) == 3
    assert all(type(item.data) is bytes for item in items)


def test_tensors_of_other_classes(tmp_path: Path) -> None:
    class Own(torch.Tensor):
        pass

    make: Any = TwoTensor
    two = make(torch.ones(3), torch.zeros(3))
    state = {
        "own": torch.arange(6.0).as_subclass(Own), "lazy": torch.complex(torch.ones(3), torch.ones(3)).conj(), "two": two,
    }  # fmt: skip
    save(state, storage_writer=StreamWriter(tmp_path / "a"), no_dist=True)
    (where,) = [
        where
        for index, where in FileSystemReader(tmp_path / "a").read_metadata().storage_data.items()
        if index.fqn == "two"
    ]
    data = (tmp_path / "a/__0_0.distcp").read_bytes()[where.offset : where.offset + where.length]
    found = torch.load(BytesIO(data), weights_only=False)  # what torch.save makes of it
    assert isinstance(found, TwoTensor)
    assert found.a.eq(1).all()
    filled = {"own": torch.zeros(6), "lazy": torch.zeros(3, dtype=torch.complex64)}
    load(filled, storage_reader=StreamReader(tmp_path / "a"), no_dist=True)
    assert filled["own"].tolist() == list(range(6))
    assert filled["lazy"].imag.eq(-1).all()


def test_an_empty_state(tmp_path: Path) -> None:
    save({}, storage_writer=StreamWriter(tmp_path / "a"), no_dist=True)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".metadata", "loaderkit-manifest.json"]
    assert latest(tmp_path) == f"{tmp_path}/a"


def test_planners_that_change_what_is_saved(tmp_path: Path) -> None:
    class Halved(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
            value = super().transform_object(write_item, object)
            return value.half() if isinstance(value, torch.Tensor) else value

    state = {"w": torch.randn(10, 10)}
    save(state, storage_writer=StreamWriter(tmp_path / "a"), planner=Halved(), no_dist=True)
    assert_same(loaded(tmp_path / "a", state, FileSystemReader), {"w": state["w"].half().float()})


def test_plans_that_are_kept(tmp_path: Path) -> None:
    for number in range(4):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((5,), float(number)), "n": number}
        path = tmp_path / f"step-{number % 3}"  # the last is saved again
        save(state, storage_writer=StreamWriter(path), planner=planner, no_dist=True)
        assert_same(loaded(path, state, FileSystemReader), state)


def test_one_writer_for_many_saves(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "first", workers=2)
    for name in ("first", "second"):
        state = {"w": torch.randn(100)}
        save(state, storage_writer=writer, checkpoint_id=tmp_path / name, no_dist=True)
        assert_same(loaded(tmp_path / name, state, FileSystemReader), state)
    assert writer.checkpoint_id == str(tmp_path / "second")
    assert writer.stats is not None
    assert writer.stats["commit_s"] > 0
    (times,) = writer.stats["ranks"][0].values()
    assert times["num_bytes"] == (tmp_path / "second/__0_0.distcp").stat().st_size
    assert all(times[name] > 0 for name in ("staging_s", "hashing_s", "writing_s", "syncing_s"))


def test_saved_in_a_thread_while_training_goes_on(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "a")
    addresses = set()
    for number in range(4):
        weights = torch.full((1000, 100), float(number))
        state: dict[str, Any] = {"w": weights, "tied": weights, "n": [number]}
        staged = writer.stage(state)
        addresses.add(staged["w"].data_ptr())
        assert staged["w"].data_ptr() == staged["tied"].data_ptr()
        del staged
        future: Any = async_save(state, storage_writer=writer, checkpoint_id=tmp_path / f"{number}", no_dist=True)
        weights.fill_(-1)
        state["n"].append(-1)
        future.result()
        found = loaderkit.restore(tmp_path / f"{number}", verify=True)
        assert found["w"].eq(number).all()
        assert found["n"] == [number]
    assert len(addresses) <= 2  # memory is kept, and one copy may still be written when the next is made
    writer.close()


def test_an_error_of_the_store_reaches_the_future_and_the_next_save_works(tmp_path: Path) -> None:
    class Broken(MemoryConnector):
        is_broken = True

        def put(self, key: str, data: Any) -> Any:
            if self.is_broken and ".metadata" in key:
                raise ConnectorError("the disk is broken")
            return super().put(key, data)

    store = Broken()
    writer = StreamWriter("given://a", connectors={"given": store})
    future: Any = async_save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException, match="the disk is broken"):
        future.result()
    store.is_broken = False
    future = async_save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    future.result()
    assert loaderkit.restore("given://a", connectors={"given": store}, verify=True)["w"].eq(1).all()


def test_two_saves_at_once_with_one_writer_are_refused() -> None:
    at, go_on = threading.Event(), threading.Event()

    class Slow(MemoryConnector):
        def create(self, key: str, size: int) -> Any:
            at.set()
            go_on.wait()
            return super().create(key, size)

    writer = StreamWriter("given://a", connectors={"given": Slow()})
    future: Any = async_save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert at.wait(60)
    with pytest.raises(CheckpointException, match="a save is running with this StreamWriter"):
        save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    go_on.set()
    future.result()


def test_a_copy_for_another_process_has_the_settings() -> None:
    writer = pickle.loads(pickle.dumps(StreamWriter("/a/b", workers=3)))
    assert writer.checkpoint_id == "/a/b"


@pytest.mark.parametrize("workers", [0, -1, 1.5, "many", True])
def test_wrong_settings(workers: Any) -> None:
    with pytest.raises(ConfigError, match="workers"):
        StreamWriter("/a", workers=workers)


def test_without_collectives_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, CheckpointException), match="leave use_collectives True"):
        save({"w": torch.ones(1)}, storage_writer=StreamWriter(tmp_path / "a"), no_dist=True, use_collectives=False)


def test_a_store_that_only_reads(tmp_path: Path) -> None:
    class ReadOnly(MemoryConnector):
        def writes(self) -> Any:
            return None

    with pytest.raises(CheckpointException, match="cannot be written to"):
        save(
            {"w": torch.ones(1)},
            storage_writer=StreamWriter("given://a", connectors={"given": ReadOnly()}),
            no_dist=True,
        )


def test_a_file_that_is_damaged_later_is_found(tmp_path: Path, rng: random.Random) -> None:
    save({"w": torch.randn(500, 500)}, storage_writer=StreamWriter(tmp_path / "a"), no_dist=True)
    path = tmp_path / "a/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[rng.randrange(1000, 10**6)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="'w' is damaged"):
        loaderkit.restore(tmp_path / "a")
