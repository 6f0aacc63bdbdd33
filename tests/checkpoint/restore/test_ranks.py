"""Several ranks: what one of them reads the others get; resharded; and who is named when one fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import rank_programs
import rank_restores
import safetensors.torch
import torch
from checkpoint_states import save_dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from loaderkit.checkpoint.transfer.layout import ReadLimits
from loaderkit.checkpoint.transfer.shared_ranges import NeededRange, assign_owners, overlap

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.matrix(1)]


def check_resharding(folder: Path, num_saving: int, sizes: Sequence[int], scale: int, kind: str = "tensors") -> None:
    assert rank_programs.run_ranks(rank_programs.save_sharded, num_saving, folder, scale, kind) == [0] * num_saving
    num_unique = sum(path.stat().st_size for path in (folder / "step-7").iterdir())
    for num_ranks in sizes:
        assert rank_programs.run_ranks(rank_programs.load_sharded, num_ranks, folder, scale, kind) == [0] * num_ranks
        said = [json.loads((folder / f"loaded-{num_ranks}-{rank}").read_text()) for rank in range(num_ranks)]
        fetched = sum(num_bytes for num_bytes, _ in said)
        # Every rank reads `.metadata`, as torch asks it to.
        fetched -= (num_ranks - 1) * (folder / "step-7/.metadata").stat().st_size
        assert fetched <= 1.05 * num_unique, f"{num_ranks} ranks: {fetched} of {num_unique}"
        if num_ranks > 1:
            shared = [stats["shared"] for _, stats in said]
            if kind == "fsdp":  # nearly everything is needed by one rank alone
                continue
            assert all(one["received_bytes"] for one in shared)
            read = [one["read_bytes"] for one in shared]
            assert max(read) <= 2 * sum(read) / num_ranks + 2**20, "owners are not balanced"


def test_saved_by_two_ranks_and_loaded_by_three(tmp_path: Path) -> None:
    check_resharding(tmp_path, 2, [3], 1)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["tensors", "fsdp"])
def test_saved_by_four_ranks_and_loaded_by_any_number(tmp_path: Path, kind: str) -> None:
    check_resharding(tmp_path, 4, [1, 2, 3, 8], 4, kind)


def test_each_rank_says_what_it_has_found_itself(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    assert rank_programs.run_ranks(rank_restores.fail_alike, 3, tmp_path) == [0, 0, 0]


def test_every_rank_gets_everything(tmp_path: Path) -> None:
    state = {**rank_programs.whole(), "large.too": torch.randn(1500, 1000), "numbers": torch.arange(7)}
    state["tied"] = state["large"]
    torch.save({**state, "step": 3}, tmp_path / "x.pt")
    assert rank_programs.run_ranks(rank_programs.restore_all, 2, tmp_path, "x.pt") == [0, 0]
    fetched = sum(json.loads((tmp_path / f"restored-{rank}").read_text()) for rank in range(2))
    assert fetched <= 1.05 * (tmp_path / "x.pt").stat().st_size


@pytest.mark.prove
def test_every_rank_gets_everything_that_many_have_saved(tmp_path: Path) -> None:
    assert rank_programs.run_ranks(rank_programs.save_sharded, 4, tmp_path, 4, "tensors") == [0] * 4
    assert rank_programs.run_ranks(rank_programs.restore_all, 3, tmp_path, "step-7") == [0] * 3
    fetched = sum(json.loads((tmp_path / f"restored-{rank}").read_text()) for rank in range(3))
    unique = sum(path.stat().st_size for path in (tmp_path / "step-7").iterdir())
    assert fetched <= 1.05 * unique + 2 * (tmp_path / "step-7/.metadata").stat().st_size


@pytest.mark.parametrize(
    ("how", "timeout_s"), [("fails", 600.0), ("dies", 600.0), pytest.param("hangs", 2.0, marks=pytest.mark.prove)]
)
def test_a_rank_that_fails_is_named(tmp_path: Path, how: str, timeout_s: float) -> None:
    """Soon: `run_ranks` has less patience than 600 s."""
    safetensors.torch.save_file({"w": torch.ones(2**22), "v": torch.ones(2**22)}, tmp_path / "large.safetensors")
    codes = rank_programs.run_ranks(rank_programs.fail_in_the_middle, 3, tmp_path, how, timeout_s)
    assert codes == [0, -9 if how == "dies" else 0, 0]
    for rank in (0, 2):
        kind, message, ranks, touched = json.loads((tmp_path / f"{how}-{rank}").read_text())
        assert (kind, ranks) == ("PeerError", [1]), message
        said = {"fails": "the disk is broken", "dies": "has probably died", "hangs": "it is reading bytes"}[how]
        assert message.startswith("rank 1 ")
        assert said in message
        assert set(touched) <= {"w", "v"}
        assert touched
    if how == "fails":
        kind, message, *_ = json.loads((tmp_path / "fails-1").read_text())
        assert kind == "CheckpointError"
        assert "the disk is broken" in message


@pytest.mark.prove
def test_a_rank_that_dies_in_dcp_load_is_named_in_the_log(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2**22), "v": torch.ones(2**22)}, tmp_path / "large.safetensors")
    assert rank_programs.run_ranks(rank_programs.die_in_load, 3, tmp_path) == [0, -9, 0]
    for rank in (0, 2):
        said, _ = json.loads((tmp_path / f"died-{rank}").read_text())
        assert any(line.startswith("rank 1 does not answer any more") for line in said), said


def test_a_log_that_grows_beside_a_checkpoint_is_no_part_of_it(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        safetensors.torch.save_file({"a": torch.ones(5)}, tmp_path / f"{rank}/model.safetensors")
    assert rank_programs.run_ranks(rank_programs.restore_beside_a_log, 2, tmp_path) == [0, 0]


def test_settings_are_those_of_all_ranks_of_a_machine(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2**20), "b": torch.ones(2**20)}, tmp_path / "x.safetensors")
    assert rank_programs.run_ranks(rank_programs.restore_with_settings, 2, tmp_path) == [0, 0]


def test_a_group_of_some_of_the_ranks(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2**20), "b": torch.ones(2**20)}, tmp_path / "x.safetensors")
    assert rank_programs.run_ranks(rank_programs.load_in_a_group, 3, tmp_path) == [0, 0, 0]
    shared = [json.loads((tmp_path / f"grouped-{rank}").read_text()) for rank in (1, 2)]
    assert all(one["received_bytes"] == one["sent_bytes"] == 2**22 for one in shared), shared


class Unknown:
    """What no reader makes."""


@pytest.mark.parametrize("kind", ["dcp", "torch", "all", "one"])
def test_a_bad_value_is_refused_on_all_ranks_before_a_tensor_is_written(tmp_path: Path, kind: str) -> None:
    state = {"w": torch.ones(2**20), "k": Unknown()}
    if kind == "torch":
        torch.save(state, tmp_path / "torch")
    else:
        save_dcp(state, tmp_path / "dcp")
    assert rank_programs.run_ranks(rank_programs.refuse_values, 2, tmp_path, kind) == [0, 0]
    for rank in range(2):
        name, message, touched, is_written = json.loads((tmp_path / f"refused-{kind}-{rank}").read_text())
        assert name == ("PeerError" if kind == "one" and rank == 0 else "CheckpointError"), message
        assert "'k' holds an object of test_ranks.Unknown" in message
        assert (touched, is_written) == ([], False)


def test_what_was_shared_is_named_where_reading_the_rest_fails(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2**20), "b": torch.ones(2**20)}, tmp_path / "x.safetensors")
    assert rank_programs.run_ranks(rank_programs.fail_in_own, 2, tmp_path) == [0, 0]
    for rank in range(2):
        ranks, message, touched = json.loads((tmp_path / f"own-{rank}").read_text())
        assert ranks == [1]
        assert "the disk is broken" in message
        assert touched == ["a", "b"]


RANGES = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 300),
        st.integers(1, 64),
        st.sets(st.integers(0, 3), min_size=1).map(lambda ranks: tuple(sorted(ranks))),
    ).map(lambda it: NeededRange(it[0], it[1], it[1] + it[2], "t", it[3])),
    max_size=20,
)


@given(RANGES, st.integers(0, 20))
@settings(max_examples=num_examples(300))
def test_owned_ranges_cover_what_is_needed_once(ranges: list[NeededRange], gap: int) -> None:
    limits = ReadLimits(most_bytes=64, coalesce_gap=gap, least_direct=16)
    owned = assign_owners(ranges, limits, 4)
    needed_by: dict[tuple[str, int], set[int]] = {}
    for key, start, end, _, ranks in ranges:
        for place in range(start, end):
            needed_by.setdefault((key, place), set()).update(ranks)
    covered = [(s.key, place) for s in owned for place in range(s.start, s.end)]
    assert len(covered) == len(set(covered))
    assert set(needed_by) <= set(covered)
    assert [(s.key, s.start) for s in owned] == sorted((s.key, s.start) for s in owned)
    for one in owned:
        assert 0 < one.num_bytes <= limits.most_bytes
        assert one.owner in one.ranks
        inside = [needed_by.get((one.key, place), set()) for place in range(one.start, one.end)]
        assert set().union(*inside) == set(one.ranks)
        assert inside[0]
        assert inside[-1]
    for rank in range(4):  # no rank owns much more than the one that owns the least of what it could own
        if all(len(one.ranks) == 4 for one in owned):
            shares = [sum(s.num_bytes for s in owned if s.owner == r) for r in range(4)]
            assert shares[rank] - min(shares) <= limits.most_bytes


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 2)), max_size=8))
def test_overlap_is_that_of_different_ranks(extents: list[tuple[int, int, int]]) -> None:
    boxes = [(start, start + size, rank) for start, size, rank in extents]
    wanted = any(a[2] != b[2] and max(a[0], b[0]) < min(a[1], b[1]) for a in boxes for b in boxes)
    assert overlap(boxes) == wanted
