"""Ranks that agree on the plan of a save keep it: one message each, until the state of one is laid out otherwise."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import DTYPES, random_tensor, same
from crashing import Clock, Mortal
from even_programs import bytes_by_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.testing._internal.two_tensor import TwoTensor

import loaderkit
from loaderkit.checkpoint import StreamWriter
from loaderkit.checkpoint.discovery.description import Format
from loaderkit.checkpoint.manager.layout import LayoutPlanner
from loaderkit.checkpoint.manager.saving import KeptPlan, messages_of, write_checkpoint
from loaderkit.checkpoint.planning.division import MIN_CUT_BYTES
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import CheckpointError, PeerError
from loaderkit.ranks.board import Board

State = dict[str, Any]


class CountingStore:
    """A store of torch's that counts what is put into it, by key."""

    def __init__(self) -> None:
        make: Any = vars(dist)["HashStore"]
        self._store = make()
        self._lock = threading.Lock()
        self.posted: Counter[str] = Counter()
        self.num_bytes = 0

    def set(self, key: str, data: bytes) -> None:
        with self._lock:
            self.posted[key] += 1
            self.num_bytes += len(data)
        self._store.set(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Job:
    """Ranks that are threads, without torch.distributed."""

    def __init__(self, folder: Path, num_ranks: int, *, renames: bool = True, kind: Format = "dcp") -> None:
        """`renames`: the store can rename, so that files are not written in their place."""
        self.store = CountingStore()
        self.boards = [Board(self.store, rank, range(num_ranks), timeout_s=60.0) for rank in range(num_ranks)]
        self._folder = folder
        connectors = {"given": Mortal(FileConnector(folder), Clock(), renames=renames)}
        self._writers = [StreamWriter("given://", connectors=connectors, format=kind) for _ in range(num_ranks)]
        self.plans = [KeptPlan() for _ in range(num_ranks)]
        self._pool = ThreadPoolExecutor(num_ranks)
        self._num_saves = 0

    def save(self, states: list[State], names: list[str] | None = None) -> list[BaseException | None]:
        """What each rank's save raises, or None; `posted` is then what was put into the store."""
        self.store.posted.clear()
        key = f"save-{self._num_saves}"
        self._num_saves += 1
        names = names or [key] * len(states)
        saves = [
            self._pool.submit(write_checkpoint, writer, f"given://{name}", state, board, key=key, kept=kept)
            for writer, state, board, kept, name in zip(
                self._writers, states, self.boards, self.plans, names, strict=True
            )
        ]
        errors = [save.exception(60) for save in saves]
        if not any(errors):
            assert self.waits_for_all()
        self.posted = sorted(
            name.removeprefix(f"{key}/")
            for name, times in self.store.posted.items()
            for _ in range(times)
            if "/alive/" not in name  # of saves that take seconds
        )
        self.boards[0].remove(messages_of(self.boards[0], key))
        return errors

    def waits_for_all(self) -> bool:
        """True once all have seen the commit of the last save; False if it failed."""
        key = f"save-{self._num_saves - 1}"
        return self.boards[0].wait_for_count(f"{key}/seen", len(self.boards), about=key, timeout_s=1e9)

    @property
    def last(self) -> Path:
        return self._folder / f"save-{self._num_saves - 1}"


@contextmanager
def job(folder: Path, num_ranks: int, *, renames: bool = True, kind: Format = "dcp") -> Iterator[Job]:
    ranks = Job(folder, num_ranks, renames=renames, kind=kind)
    with ranks._pool:
        yield ranks


def kept_messages(num_ranks: int) -> list[str]:
    return ["outcome", "place", *(f"written/{rank}" for rank in range(num_ranks))]


def whole(seed: int, scale: int = 1) -> State:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(300 * scale, 100, generator=generator)
    return {"weight": weight, "tied": weight, "bias": torch.randn(100, generator=generator), "step": seed}


def assert_restored(path: Path, states: list[State]) -> None:
    expected: State = {}
    for state in states:
        expected = state | expected
    restored = loaderkit.restore(path, verify=True)
    assert restored.keys() == expected.keys()
    for name, value in expected.items():
        assert same(restored[name], value), name


def test_one_message_a_rank_and_no_key_is_left(tmp_path: Path) -> None:
    with job(tmp_path, 4) as ranks:
        for seed in range(5):
            states = [whole(seed) | {f"own.{rank}": torch.full((3,), float(rank))} for rank in range(4)]
            assert ranks.save(states) == [None] * 4
            assert_restored(ranks.last, states)
            if seed:
                assert ranks.posted == kept_messages(4)
        assert ranks.store.num_keys() == 0


def test_tied_tensors_are_written_once_and_evenly(tmp_path: Path) -> None:
    """The names of the same memory are cut at the same places; where a rank has them apart, they are two tensors."""
    with job(tmp_path, 3) as ranks:
        assert ranks.save([whole(1) for _ in range(3)]) == [None] * 3
        sizes = [path.stat().st_size for path in sorted(ranks.last.glob("*.distcp"))]
        assert max(sizes) - min(sizes) < 8_000
        assert sum(sizes) < 120_000 + 400 + 20_000
        states = [whole(1) for _ in range(3)]
        states[2]["tied"] = states[2]["tied"].clone()
        assert ranks.save(states) == [None] * 3
        assert sum(path.stat().st_size for path in ranks.last.glob("*.distcp")) > 240_000


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_change_on_one_rank_is_found(changed: int, renames: bool, tmp_path: Path) -> None:
    def states(scale: int, *, is_changed: bool) -> list[State]:
        found = [whole(scale), whole(scale)]
        if is_changed:
            found[changed] |= {"own": torch.arange(5_000.0), "note": "new"}
        return found

    with job(tmp_path, 2, renames=renames) as ranks:
        for scale, is_changed in ((1, False), (1, False), (1, True), (1, True), (2, True), (2, False)):
            before = states(scale, is_changed=is_changed)
            assert ranks.save(before) == [None, None]
            assert_restored(ranks.last, before)
            assert len(list(ranks.last.glob("*.distcp"))) == 2  # none is left of an attempt that was given up
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"save-{number}" for number in range(6)]


def test_a_rank_with_another_plan_agrees_anew(tmp_path: Path) -> None:
    """As one has that did not hear of the commit."""
    with job(tmp_path, 3) as ranks:
        states = [whole(1) for _ in range(3)]
        assert ranks.save(states) == [None] * 3
        for rank in range(3):
            ranks.plans[rank].number = "another"
            assert ranks.save(states) == [None] * 3
            assert_restored(ranks.last, states)
            assert len({plan.number for plan in ranks.plans}) == 1
            assert ranks.save(states) == [None] * 3
            assert ranks.posted == kept_messages(3)


def test_a_failure_leaves_the_plan_as_it_was(tmp_path: Path) -> None:
    with job(tmp_path, 2) as ranks:
        assert ranks.save([whole(1), whole(1)]) == [None, None]
        for _ in range(2):
            lock = threading.Lock()  # which nothing can pickle; one of the two ranks writes it
            errors = ranks.save([whole(1) | {"step": lock}, whole(1) | {"step": lock}])
            assert {type(error) for error in errors} == {TypeError, PeerError}
            assert not ranks.waits_for_all()
            assert not ranks.last.exists()
            assert ranks.save([whole(2), whole(2)]) == [None, None]
            assert ranks.posted == kept_messages(2)
            assert_restored(ranks.last, [whole(2)])


@pytest.mark.parametrize("is_kept", [False, True])
def test_ranks_that_save_different_steps(is_kept: bool, tmp_path: Path) -> None:
    with job(tmp_path, 2) as ranks:
        if is_kept:
            assert ranks.save([whole(1), whole(1)]) == [None, None]
        errors = ranks.save([whole(1), whole(1)], ["a", "b"])
        assert isinstance(errors[0], PeerError)
        assert isinstance(errors[1], CheckpointError)
        assert "save different steps" in str(errors[1])
        assert not [path.name for path in tmp_path.iterdir() if path.name in ("a", "b")]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("other", [torch.ones(101), torch.ones(100, dtype=torch.float64)])
def test_a_tensor_that_differs_by_rank(other: torch.Tensor, is_kept: bool, tmp_path: Path) -> None:
    """Parts of each rank's would be no tensor that anybody had."""
    with job(tmp_path, 2) as ranks:
        if is_kept:
            assert ranks.save([whole(1), whole(1)]) == [None, None]
        errors = ranks.save([whole(1), whole(1) | {"bias": other}])
        assert isinstance(errors[0], CheckpointError)
        assert isinstance(errors[1], PeerError)
        said = f"'bias' is torch.float32 of shape [100] on rank 0, and {other.dtype} of shape [{len(other)}] on rank 1"
        assert said in str(errors[0])
        assert not ranks.last.exists()
        assert ranks.save([whole(2), whole(2)]) == [None, None]
        assert_restored(ranks.last, [whole(2)])


SHAPES = st.lists(st.integers(0, 60), max_size=3)
KINDS = st.sampled_from(["plain", "transposed", "strided", "tied"])


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES), KINDS), max_size=12), st.integers(0, 99))
@settings(max_examples=num_examples(30), deadline=None)
def test_any_tensors_on_four_ranks(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[list[int], torch.dtype, str]], seed: int
) -> None:
    """The same on all ranks: restored to the last bit, each byte written once, and evenly."""
    tensors: list[torch.Tensor] = []
    num_bytes = 0
    for number, (shape, dtype, kind) in enumerate(drawn):
        if kind == "tied" and tensors:
            tensors.append(tensors[number // 2])
            continue
        tensor = random_tensor(dtype, tuple(shape), seed + number)
        if tensor.ndim and kind == "transposed":
            tensor = tensor.transpose(0, -1)
        elif tensor.ndim and kind == "strided":
            tensor = tensor[..., ::2]
        tensors.append(tensor)
        num_bytes += tensor.numel() * tensor.itemsize
    with job(tmp_path_factory.mktemp("run"), 4) as ranks:
        states: list[State] = [{str(number): tensor for number, tensor in enumerate(tensors)} for _ in range(4)]
        assert ranks.save(states) == [None] * 4
        assert_restored(ranks.last, states[:1])
        found, _ = bytes_by_rank(ranks.last)
    assert sum(found.values()) == num_bytes
    loads = [found[rank] for rank in range(4)]
    assert max(loads) <= 1.02 * min(loads) or max(loads) - min(loads) < MIN_CUT_BYTES


LAYOUTS = st.lists(st.tuples(st.integers(1, 2), st.booleans(), st.booleans()), min_size=3, max_size=3)


@given(st.lists(LAYOUTS, min_size=2, max_size=5), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_whatever_changes_when(
    tmp_path_factory: pytest.TempPathFactory, saves: list[list[tuple[int, bool, bool]]], seed: int
) -> None:
    """Each save holds what the ranks have then, and those after one in the same layout take one message a rank."""
    with job(tmp_path_factory.mktemp("run"), 3) as ranks:
        before = None
        for number, layouts in enumerate(saves):
            states: list[State] = []
            for rank, (_, has_own, has_value) in enumerate(layouts):
                state = whole(seed + number, layouts[0][0])
                state |= {f"own.{rank}": torch.full((rank, 7_000), float(number))} if has_own else {}
                state |= {"value": number} if has_value else {}
                states.append(state)
            assert ranks.save(states) == [None] * 3
            assert_restored(ranks.last, states)
            layout = [layouts[0][0], [one[1:] for one in layouts]]
            assert (ranks.posted == kept_messages(3)) == (layout == before)
            before = layout


def planner_of(state: State) -> LayoutPlanner:
    planner = LayoutPlanner()
    planner.set_up_planner(state)
    return planner


TENSORS = st.builds(
    lambda shape, dtype, is_sparse: (
        torch.zeros(shape, dtype=dtype).to_sparse() if is_sparse else torch.zeros(shape, dtype=dtype)
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=2),
    st.sampled_from([torch.float32, torch.int32]),
    st.booleans(),
)
LEAVES = st.dictionaries(
    st.sampled_from("ab"), TENSORS | st.integers(0, 1) | st.sampled_from(["same", "other"]), max_size=2
)


@given(LEAVES, LEAVES)
def test_the_digest_tells_layouts_apart(one: State, other: State) -> None:
    """It is equal if and only if the local plans are."""
    shared = torch.ones(2)
    digests, plans = [], []
    for state in (one, other):
        tensors = {"same": shared, "other": torch.ones(2)}
        planner = planner_of(
            {
                "nested": {
                    name: tensors.get(value, value) if isinstance(value, str) else value
                    for name, value in state.items()
                },
                "shared": shared,
            }
        )
        digests.append(planner.digest())
        plans.append(repr(planner.create_local_plan()))
    assert (digests[0] == digests[1]) == (plans[0] == plans[1])


def test_wrappers_are_not_cut(tmp_path: Path) -> None:
    make: Any = TwoTensor
    with job(tmp_path, 2) as ranks:
        two = make(torch.ones(50_000), torch.zeros(50_000))
        states: list[State] = [{"two": two, "other": torch.ones(100_000)} for _ in range(2)]
        assert ranks.save(states) == [None, None]
        described: Any = FileSystemReader(ranks.last).read_metadata().state_dict_metadata
        assert len(described["two"].chunks) == 1
        assert len(described["other"].chunks) == 2
        assert sum(path.stat().st_size for path in ranks.last.glob("*.distcp")) < 2 * 200_000 + 400_000 + 10_000
