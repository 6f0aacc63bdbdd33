"""Ranks that hold the same divide it by bytes; torch's reader and ours put it together again, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import even_programs
import pytest
from rank_programs import run_ranks

from loaderkit.checkpoint.planning.division import MIN_CUT_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.prove
def test_plain_dcp_save(tmp_path: Path) -> None:
    assert run_ranks(even_programs.save_even, 4, tmp_path, 5) == [0] * 4
    found, cut = even_programs.bytes_by_rank(tmp_path / "step-1")
    tensors = even_programs.whole_tensors(5)
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}
    # DCP's plans do not tell which names have the same memory.
    assert sum(found.values()) == 2 * sum(sizes.values()) - sizes["scalar"] - sizes["tied"]
    assert max(found.values()) <= 1.02 * min(found.values())
    assert {f"whole.{name}" for name, size in sizes.items() if size < MIN_CUT_BYTES}.isdisjoint(cut)
    found, cut = even_programs.bytes_by_rank(tmp_path / "step-2")
    assert sorted(found) == [0, 1]  # all that is replicated on the lowest rank that holds it
    # Plans that the planner keeps: its first is divided, later ones are as torch's, also if the plan of one rank changes.
    cut_plans = [even_programs.bytes_by_rank(tmp_path / f"step-{number}")[1] for number in (3, 4, 5)]
    assert [any(name.startswith("whole") for name in names) for names in cut_plans] == [True, False, False]
    even_programs.restore_even(tmp_path, 5)
    for num_ranks in (1, 2, 3):
        assert run_ranks(even_programs.load_even, num_ranks, tmp_path, 5) == [0] * num_ranks


@pytest.mark.prove
def test_the_manager_writes_each_byte_once_without_a_collective(tmp_path: Path) -> None:
    assert run_ranks(even_programs.save_kept, 4, tmp_path, 5) == [0] * 4
    tensors = even_programs.whole_tensors(5)
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}
    both = 2 * (sum(sizes.values()) - sizes["tied"]) - sizes["scalar"]
    for step in range(1, 8):
        found, cut = even_programs.bytes_by_rank(tmp_path / f"step-{step:010}")
        assert sum(found.values()) == both + 160_000 * (step > 3) + 40 * (step > 5)
        assert max(found.values()) <= 1.02 * min(found.values())
        assert {f"whole.{name}" for name, size in sizes.items() if size < MIN_CUT_BYTES}.isdisjoint(cut)
    for rank in range(4):
        posted = json.loads((tmp_path / f"posted-{rank}.json").read_text())
        for step in (2, 3, 5, 7):  # as the one before
            messages = [key for key in posted[str(step)] if not key.startswith("alive")]
            assert messages == (["place", "written/0", "outcome"] if rank == 0 else [f"written/{rank}"])
    even_programs.restore_even(tmp_path, 5)
    for num_ranks in (1, 2, 3):
        assert run_ranks(even_programs.load_even, num_ranks, tmp_path, 5) == [0] * num_ranks
