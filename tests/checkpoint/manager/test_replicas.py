"""Nodes with local directories of their own: killed, or with a directory removed, they restore from what the others have."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import node_programs
import pytest
import rank_programs

import loaderkit
from loaderkit.checkpoint.discovery.listing import list_checkpoints
from loaderkit.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def save(
    folder: Path, num_ranks: int, ranks_a_node: int, steps: list[int], victims: list[int], **settings: Any
) -> None:
    codes = rank_programs.run_ranks(
        node_programs.save_steps, num_ranks, folder, ranks_a_node, steps, victims, settings, patience_s=400.0
    )
    assert codes == [-9 if rank in victims else 0 for rank in range(num_ranks)]
    firsts = range(0, num_ranks, ranks_a_node)
    counts = [json.loads((folder / f"saved-{rank}.json").read_text()) for rank in range(num_ranks)]
    assert all((count >= 1) if rank in firsts else (count == -1) for rank, count in enumerate(counts))


def restored(folder: Path, num_ranks: int, names: list[str], *, is_away: bool, scale: int = 1) -> tuple[int, list[str]]:
    """The step, which each rank compares to the last bit, and the warnings of rank 0; nothing is read from the far store."""
    name = f"from-{'-'.join(names)}-{is_away}"
    codes = rank_programs.run_ranks(
        node_programs.restore_from, num_ranks, folder, names, name, is_away, scale, patience_s=400.0
    )
    assert codes == [0] * num_ranks
    found = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(num_ranks)]
    assert {one[3] for one in found} == {""}
    assert found[0][1] == ["list"]  # are there newer ones?
    assert all(one[1] == [] for one in found[1:])
    (step,) = {one[0] for one in found}
    return step, found[0][2]


def test_killed_and_a_node_s_directory_removed(tmp_path: Path) -> None:
    save(tmp_path, 2, 1, [1, 2, 3], [0, 1])
    shutil.rmtree(tmp_path / "near-1")
    step, _ = restored(tmp_path, 2, ["near-0", "near-1"], is_away=False)
    assert step in (3, 4)  # the one that was being saved may have come to be whole, and on both nodes
    step, said = restored(tmp_path, 1, ["near-0"], is_away=True)
    assert step in (3, 4)
    assert any("may have newer checkpoints than the nodes do, and cannot be asked: no route" in line for line in said)


def test_without_a_replica_the_far_store_is_asked(tmp_path: Path) -> None:
    """Of four nodes two neighbours are lost: a step is passed over, and said, and read from where checkpoints last."""
    save(tmp_path, 4, 1, [1, 2], [])
    for number in (1, 2):
        shutil.rmtree(tmp_path / f"near-{number}")
    names = ["near-0", "near-3"]
    assert rank_programs.run_ranks(node_programs.restore_from, 2, tmp_path, names, "far", False) == [0, 0]
    step, asked, said, error = json.loads((tmp_path / "far-0.json").read_text())
    assert (step, error) == (2, "")
    assert "read" in asked
    assert any("step-0000000002 is passed over: none of 2 nodes has __1_" in line for line in said)
    for number in (1, 2):
        shutil.rmtree(tmp_path / f"near-{number}", ignore_errors=True)
    assert rank_programs.run_ranks(node_programs.restore_from, 2, tmp_path, names, "away", True) == [0, 0]
    step, asked, said, error = json.loads((tmp_path / "away-0.json").read_text())
    assert step is None
    assert "no route to the store" in error  # and not: there is none, begin anew


@pytest.mark.parametrize(("within", "is_held", "place"), [("1h", False, "to"), ("1ms", True, "local")])
def test_a_notice_bounds_the_wait_for_replicas(within: str, is_held: bool, place: str, tmp_path: Path) -> None:
    codes = rank_programs.run_ranks(node_programs.save_until_noticed, 2, tmp_path, within, is_held, patience_s=400.0)
    assert codes == [0, 0]
    last, *others = [json.loads((tmp_path / f"noticed-{rank}.json").read_text()) for rank in range(2)]
    assert last == [last[0], place]
    assert others == [last]
    whole = [*tmp_path.glob(f"near-*/replicas/step-{last[0]:010d}/")]
    assert len(whole) == (0 if is_held else 2)
    assert restored(tmp_path, 2, ["near-0", "near-1"], is_away=True) == (last[0], ANY)


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replicas: they are of what is in `local`"):
        loaderkit.CheckpointManager(tmp_path / "run", replicas=1)
    with pytest.raises(ConfigError, match="a path on its own disk or tmpfs, not 's3://bucket/x'"):
        loaderkit.CheckpointManager(tmp_path / "run", replicas=1, local="s3://bucket/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="does not serve as the folder of a node"):
        loaderkit.CheckpointManager(tmp_path / "run", replicas=1, local=tmp_path / "file")


def test_one_node_alone_has_no_replica_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with loaderkit.CheckpointManager(tmp_path / "far", local=tmp_path / "near", replicas=1) as checkpoints:
        checkpoints.save(1, {"n": 1}, wait=True)
        state = {"n": 0}
        assert checkpoints.restore(state) == state["n"] == 1
    assert "there is no other node to keep a replica on" in caplog.text
    assert [item.step for item in list_checkpoints(tmp_path / "near")] == [1]


@pytest.mark.prove
@pytest.mark.parametrize("ranks_a_node", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"format": "safetensors"}, {"flush": "process"}], ids=str)
def test_any_of_the_nodes_that_together_have_all(
    ranks_a_node: int, settings: dict[str, Any], tmp_path: Path, rng: random.Random
) -> None:
    """Random kills, nodes lost, other numbers of ranks and orders of nodes; then it goes on, and again."""
    first = 1
    for turn in range(4):
        num_nodes = rng.randint(2, 4 // ranks_a_node)
        num_ranks = num_nodes * ranks_a_node
        victims = rng.sample(range(num_ranks), rng.choice([1, num_ranks]))
        folder = tmp_path / f"{turn}"
        folder.mkdir()
        save(folder, num_ranks, ranks_a_node, [first, first + 1], victims, scale=40, **settings)
        lost = rng.randrange(num_nodes)
        shutil.rmtree(folder / f"near-{lost}")
        names = [f"near-{number}" for number in range(num_nodes) if number != lost or rng.random() < 0.5]
        rng.shuffle(names)
        again = len(names) * rng.choice([1, 2])
        for is_away in (True, False):
            step, _ = restored(folder, again, names, is_away=is_away, scale=40)
            assert step in (first + 1, first + 2)
