"""Whenever a script builds its loader, ranks share out the samples, or an error says what to pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import rank_programs
import ranked_loaders
import torch.multiprocessing
from conftest import HELPERS
from ranked_loaders import NUM_SAMPLES, built

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = str(HELPERS / "ranked_loaders.py")
LIGHTNING = {"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2"}  # it sets no RANK


class Far(MemoryConnector):
    """Reads of it wait for a network, as far as the loader knows."""

    traits = ConnectorTraits(is_remote=True)

    def __init__(self) -> None:
        super().__init__({f"{number:02}.bin": bytes([number]) for number in range(NUM_SAMPLES)})
        self.keys_read: set[str] = set()

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        self.keys_read.add(key)


def assert_shared_out(folder: Path) -> None:
    """Two ranks have the samples of one, in turns."""
    parts = [json.loads((folder / f"samples-{rank}").read_text()) for rank in range(2)]
    together = [sample for pair in zip(*parts, strict=True) for sample in pair]
    assert sorted(together) == list(range(NUM_SAMPLES))
    with built(rank=0, world_size=1) as loader:
        assert together == [sample for batch in loader for sample in batch["0"].tolist()]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("environment", [{}, LIGHTNING, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_built_before_the_process_group(tmp_path: Path, environment: dict[str, str]) -> None:
    """As in what `mp.spawn` runs, and in processes that Lightning's ddp starts."""
    assert rank_programs.run_ranks(ranked_loaders.build_then_init, 2, tmp_path, environment) == [0, 0]
    assert_shared_out(tmp_path)


def test_built_before_the_ranks_are_forked(tmp_path: Path) -> None:
    assert rank_programs.run_ranks(ranked_loaders.build_then_fork, 1, tmp_path, 2) == [0]
    assert_shared_out(tmp_path)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mp.spawn", marks=pytest.mark.prove),
        *(pytest.param(name, marks=pytest.mark.integration) for name in ("torchrun", "ddp", "ddp_fork")),
    ],
)
def test_launched_by(tmp_path: Path, launcher: str) -> None:
    """`ddp` and `ddp_fork` are strategies of Lightning's."""
    if launcher == "mp.spawn":
        torch.multiprocessing.spawn(ranked_loaders.build_then_init, (2, tmp_path), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    else:
        is_torchrun = launcher == "torchrun"
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if is_torchrun else []
        command = [sys.executable, *run, SCRIPT, str(tmp_path), launcher]
        subprocess.run(command, check=True, cwd=tmp_path)
    assert_shared_out(tmp_path)


@pytest.mark.parametrize("how", ["iter", "len"])
def test_a_process_group_that_comes_too_late_is_an_error(tmp_path: Path, how: str) -> None:
    assert rank_programs.run_ranks(ranked_loaders.init_too_late, 2, tmp_path, how) == [0, 0]
    for rank in range(2):
        rest, said = json.loads((tmp_path / f"said-{rank}").read_text())
        assert len(rest) == (NUM_SAMPLES - 2 if how == "iter" else 0), "an epoch that has begun goes on as it is"
        assert len(said) == 3
        for message in said:
            assert (
                f"is rank 0 of 1 since it first iterated or gave its length, and this process is rank {rank} of 2"
                in message
            )
            assert "pass rank= and world_size= to build()" in message


def test_what_is_given_always_wins(tmp_path: Path) -> None:
    assert rank_programs.run_ranks(ranked_loaders.given, 2, tmp_path) == [0, 0]
    with built(rank=2, world_size=3) as loader:
        ranked_loaders.save_samples(loader, tmp_path, 2)
    parts = [json.loads((tmp_path / f"samples-{rank}").read_text()) for rank in range(3)]
    assert {sample for part in parts for sample in part} == set(range(NUM_SAMPLES))


class TestTheEnvironment:
    @pytest.fixture(autouse=True)
    def _bare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)

    @pytest.mark.parametrize("environment", [{"WORLD_SIZE": "4"}, {"RANK": "0"}])
    @pytest.mark.parametrize("ask", [iter, len, lambda loader: loader.start(), lambda loader: loader.profile()])
    def test_half_of_it_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ask: Callable[[object], object]
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with built() as loader:
            assert loader.num_samples == NUM_SAMPLES
            assert "rank not taken yet" in repr(loader)
            with pytest.raises(ConfigError) as caught:
                ask(loader)
            (name,) = environment
            missing = "RANK" if name == "WORLD_SIZE" else "WORLD_SIZE"
            assert str(caught.value).startswith(f"{name}={environment[name]} is set and {missing} is not")
            assert "pass rank= and world_size= to build()" in str(caught.value)
        with built(rank=1, world_size=4) as loader:
            assert "on rank 1 of 4" in repr(loader)
            next(iter(loader))

    def test_is_taken_when_the_loop_begins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with built() as loader:
            state = loader.state_dict()
            loader.load_state_dict(state)
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("LOCAL_RANK", "0")  # on the second of several machines
            monkeypatch.setenv("WORLD_SIZE", "3")
            assert sum(len(batch["0"]) for batch in loader) == -(-NUM_SAMPLES // 3)
            assert "on rank 1 of 3" in repr(loader)
            monkeypatch.setenv("RANK", "2")
            with pytest.raises(ConfigError, match=r"is rank 1 of 3 since .* is rank 2 of 3 now"):
                iter(loader)
            assert loader.state_dict()["epoch"] == 1, "what failed uses up no epoch"

    @pytest.mark.parametrize("executor", ["inline", "thread", pytest.param("process", marks=pytest.mark.prove)])
    def test_what_is_read_ahead_is_of_the_rank_that_iterates(
        self, monkeypatch: pytest.MonkeyPatch, executor: str
    ) -> None:
        far = Far()
        overrides = {"prefetch.executor": executor}
        pipeline = Pipeline.files("far://x", include="*.bin").read().batch(2).epochs(1)
        with loaderkit.build(pipeline, connectors={"far": far}, overrides=overrides) as loader:
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", "2")
            keys = [key for batch in loader for key in batch["__key__"]]
        if executor != "process":  # which reads by a copy of the connector
            assert set(keys) <= far.keys_read <= {*keys, "00.bin"}, "only the sample that tells the shapes is another's"
        with loaderkit.build(pipeline, rank=1, world_size=2, connectors={"far": far}) as loader:
            assert keys == [key for batch in loader for key in batch["__key__"]]

    def test_a_report_is_of_the_rank_that_iterates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with built() as loader:
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", "2")
            with loader.profile() as profile:
                list(loader)
        assert (profile.result.rank, profile.result.world_size) == (1, 2)

    def test_too_many_ranks_for_a_batch_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with built(drop_last=True) as loader:
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", "12")
            with pytest.raises(
                ConfigError, match="no batch at all: 22 samples do not fill one batch of 2 on each of 12"
            ):
                iter(loader)

    @pytest.mark.parametrize("environment", [("three", "4"), ("1", "few"), ("4", "4"), ("-1", "4"), ("", "4")])
    def test_what_is_no_rank_is_an_error(self, monkeypatch: pytest.MonkeyPatch, environment: tuple[str, str]) -> None:
        rank, world_size = environment
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with (
            built() as loader,
            pytest.raises(ConfigError, match=rf"RANK='{rank}', WORLD_SIZE='{world_size}'.*pass rank="),
        ):
            iter(loader)
