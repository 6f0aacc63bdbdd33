"""Several ranks save one checkpoint as safetensors: shards come together from all of them; one that fails fails for all."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import safetensors_programs as programs
import torch
from rank_programs import run_ranks
from safetensors.torch import load_file
from seaweed import free_port
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import loaderkit
from loaderkit.checkpoint import latest
from loaderkit.checkpoint.save.safetensors import layout
from loaderkit.checkpoint.save.safetensors.layout import Offer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("kind", "num_saving", "min_file_bytes"),
    [("tensors", 2, 1), ("fsdp", 2, 2**26), pytest.param("fsdp", 4, 1, marks=pytest.mark.prove)],
)
def test_saved_by_some_and_loaded_by_others(kind: str, num_saving: int, min_file_bytes: int, tmp_path: Path) -> None:
    assert run_ranks(programs.save_streamed, num_saving, tmp_path, kind, min_file_bytes) == [0] * num_saving
    ours, theirs = (
        loaderkit.restore(tmp_path / name, verify=check) for name, check in (("step-7", True), ("torch", False))
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value, name
    read = {
        name: tensor for path in (tmp_path / "step-7").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert len(read) == sum(isinstance(value, torch.Tensor) for value in theirs.values())
    for num_loading in (1, 3):
        assert run_ranks(programs.load_streamed, num_loading, tmp_path, kind) == [0] * num_loading


def test_shards_of_all_kinds_become_whole_tensors(tmp_path: Path) -> None:
    assert run_ranks(programs.save_grid, 4, tmp_path) == [0] * 4
    for name, number in (("a", 1), ("b", 3)):
        (path,) = (tmp_path / name).glob("*.safetensors")
        tensors, wanted = load_file(path), programs.whole_grid(number)
        assert tensors.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert tensors[key].dtype == tensor.dtype
            assert torch.equal(tensors[key], tensor), key
        assert loaderkit.restore(tmp_path / name, verify=True)["step"] == number
    assert not [*tmp_path.glob(".saving*")]


@pytest.mark.prove
@pytest.mark.parametrize("how", ["whole", "sharded", "process"])
def test_training_goes_on_to_the_last_bit(how: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run_ranks(programs.train, 2, whole, "whole", how, free_port(), (0, 6)) == [0, 0]
    assert run_ranks(programs.train, 2, tmp_path, "first", how, free_port(), (0, 3)) == [0, 0]
    assert run_ranks(programs.train, 2, tmp_path, "second", how, free_port(), (3, 6)) == [0, 0]
    for rank in range(2):
        expected, found = (
            json.loads((folder / f"{name}-{rank}.json").read_text())
            for folder, name in ((whole, "whole"), (tmp_path, "second"))
        )
        assert found["losses"] == {step: loss for step, loss in expected["losses"].items() if int(step) > 3}
        assert found["next"] == expected["next"]


def test_what_all_ranks_hold_is_written_evenly(tmp_path: Path, rng: random.Random) -> None:
    seed = rng.randrange(1000)
    assert run_ranks(programs.save_replicated, 4, tmp_path, seed) == [0] * 4
    sizes = json.loads((tmp_path / f"replicated-{seed}-0.json").read_text())
    assert len(sizes) == 4
    assert max(sizes.values()) <= 1.02 * min(sizes.values())
    found = loaderkit.restore(tmp_path / "run" / f"step-{seed:010}", verify=True)
    wanted = programs.replicated(seed)
    for name, tensor in wanted["model"].items():
        assert torch.equal(found[f"model.{name}"], tensor)
    for name, moments in wanted["optimizer"].items():
        assert torch.equal(found[f"optimizer.{name}.exp_avg"], moments["exp_avg"])


def test_whole_tensors_go_to_ranks_that_have_them(rng: random.Random) -> None:
    """Each byte of a state of random sizes is written by a rank that holds it, and each writes about as much."""
    for _ in range(20):
        num_ranks = rng.randint(2, 5)
        sizes = [int(10 ** rng.uniform(4, 7)) for _ in range(rng.randint(60, 100))] + [1000] * 40
        state = {"model": {f"w{n}": torch.empty(size, device="meta") for n, size in enumerate(sizes)}}
        planners = [DefaultSavePlanner() for _ in range(num_ranks)]
        for rank, planner in enumerate(planners):
            planner.set_up_planner(state, is_coordinator=rank == 0)
        plans, _ = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
        offer = Offer(None, {f"model.w{number}": number for number in range(len(sizes))})
        made = layout.lay_out(plans, [offer] * num_ranks, 0)
        loads = [0] * num_ranks
        for file in made.files:
            for tensor in file.tensors:
                (chunk,) = tensor.chunks
                assert chunk.rank == file.writer
                assert made.given[chunk.rank][chunk.number] == (tensor.name, (0,))
                loads[file.writer] += tensor.num_bytes
        assert sum(loads) == 4 * sum(sizes)
        if len(made.files) == num_ranks and max(sizes) * num_ranks < 0.9 * sum(sizes):
            assert max(loads) <= 1.02 * min(loads)


def test_tied_tensors_of_all_ranks_are_written_once(tmp_path: Path) -> None:
    assert run_ranks(programs.save_tied, 2, tmp_path) == [0, 0]
    step = tmp_path / "run" / "step-0000000001"
    assert sorted(load_file(step / "model.safetensors")) == ["a", "c", "d"]
    assert sorted(load_file(step / "ema.safetensors")) == ["a"]
    found = loaderkit.restore(step, verify=True, keys=["model.*", "ema.*"])
    assert sorted(found) == ["ema.a", "model.a", "model.b", "model.c", "model.d", "model.e"]
    assert torch.equal(found["model.b"], found["ema.a"])
    assert torch.equal(found["model.c"], found["model.b"] + 1)
    assert found["model.e"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["fails", "killed"])
def test_one_rank_that_fails_while_others_need_its_parts(how: str, failing: int, tmp_path: Path) -> None:
    codes = run_ranks(programs.fail_on_one, 2, tmp_path, failing, how)
    assert codes[failing] == (9 if how == "killed" else 0)
    assert latest(tmp_path) == f"{tmp_path}/step-1"
    told = (tmp_path / f"failed-{1 - failing}").read_text()
    assert "the disk is gone" in told if how == "fails" else told


def test_one_rank_that_fails_in_the_manager(tmp_path: Path) -> None:
    assert run_ranks(programs.fail_in_manager, 2, tmp_path) == [0, 0]
    for rank in range(2):
        message, steps = json.loads((tmp_path / f"failed-{rank}.json").read_text())
        assert "No space left" in message or "rank 1" in message
        assert steps == [1, 3]
