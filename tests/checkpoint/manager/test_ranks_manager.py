"""CheckpointManager on several ranks: one checkpoint of all, restored by any number; notices, failures and deaths."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import manager_programs
import pytest
import rank_programs

pytestmark = pytest.mark.filterwarnings("ignore")


def said(folder: Path, name: str, num_ranks: int) -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_training_goes_on_to_the_last_bit(sharded: bool, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert rank_programs.run_ranks(manager_programs.run, 2, whole, "whole", sharded, 0, 8) == [0, 0]
    assert rank_programs.run_ranks(manager_programs.run, 2, tmp_path, "first", sharded, 0, 3) == [0, 0]
    assert rank_programs.run_ranks(manager_programs.run, 2, tmp_path, "second", sharded, 3, 8) == [0, 0]
    expected, found, first = said(whole, "whole", 2), said(tmp_path, "second", 2), said(tmp_path, "first", 2)
    for rank in range(2):
        late = {step: loss for step, loss in expected[rank]["losses"].items() if int(step) > 3}
        assert found[rank]["losses"] == late
        assert found[rank]["total"] == expected[rank]["total"]
        assert found[rank]["drawn"] == first[rank]["next"]  # each rank its own generators
        assert found[rank]["steps"] == [3, 6]
    assert found[0]["drawn"] != found[1]["drawn"]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks(num_ranks: int, tmp_path: Path) -> None:
    sharded = num_ranks > 1
    assert rank_programs.run_ranks(manager_programs.run, 2, tmp_path, "first", sharded, 0, 6) == [0, 0]
    codes = rank_programs.run_ranks(manager_programs.run, num_ranks, tmp_path, "second", sharded, 6, 8)
    assert codes == [0] * num_ranks
    found = said(tmp_path, "second", num_ranks)
    assert len({json.dumps(one["drawn"]) for one in found}) == num_ranks
    assert all(one["total"] == [36.0] * 3 for one in found)


def test_a_notice_to_one_rank_stops_all_at_one_step(tmp_path: Path, rng: random.Random) -> None:
    """Twice: the second run goes on where the first one stopped."""
    stopped = 0
    for _ in range(2):
        victim, at_step, every = rng.randrange(2), rng.randint(1, 5), rng.choice([1, 2, 100])
        for path in tmp_path.glob("sto*"):
            path.unlink()
        codes = rank_programs.run_ranks(manager_programs.stop_on_notice, 2, tmp_path, victim, at_step, every)
        assert codes == [0, 0]
        (first, step, steps), other = said(tmp_path, "stopped", 2)
        assert other == [first, step, steps]
        assert first == stopped
        assert step == steps[-1]
        assert first + at_step <= step <= first + at_step + 2
        stopped = step


def test_a_failure_on_one_rank_is_heard_on_all(tmp_path: Path) -> None:
    assert rank_programs.run_ranks(manager_programs.fail_on_one, 2, tmp_path) == [0, 0]
    (first, *steps), (second, *others) = said(tmp_path, "failed", 2)
    assert first.startswith("PeerError: rank 1 failed: ConnectorError: No space left on device")
    assert second == "ConnectorError: No space left on device"
    assert steps == others == [[1], [1, 3]]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-0000000001", "step-0000000003"]


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    assert rank_programs.run_ranks(manager_programs.die_while_saving, 2, tmp_path) == [0, -9]
    message, steps = json.loads((tmp_path / "survived-0.json").read_text())
    assert message.startswith("PeerError: rank 1 did not come within 3 s (while a checkpoint is written)")
    assert steps == [1]


def test_rank_0_uploads_and_all_wait_for_it(tmp_path: Path) -> None:
    assert rank_programs.run_ranks(manager_programs.upload, 2, tmp_path) == [0, 0]
    (whole, first, *rest, num_uploaded), (others_whole, second, *others, none) = said(tmp_path, "uploaded", 2)
    assert whole == others_whole == ["step-0000000001"]
    assert first[0] == "ConnectorError: no route to the store"
    assert second[0] == f"PeerError: rank 0 failed: {first[0]} (while rank 0 uploads checkpoints)"
    # Step 2 is damaged in the local directory before it is uploaded: all restore step 1, and it cannot be uploaded.
    assert rest == others == [1, [1, 2]]
    assert "is damaged, so nothing is copied" in first[1]
    assert second[1] == f"PeerError: rank 0 failed: {first[1]} (while rank 0 uploads checkpoints)"
    assert (num_uploaded, none) == (1, None)


def test_a_local_directory_that_the_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    assert rank_programs.run_ranks(manager_programs.local_of_its_own, 2, tmp_path) == [0, 0]
    first, second = said(tmp_path, "refused", 2)
    assert first.startswith("local: 1 of 2 ranks, such as 1 on ")
    assert "near-0 what rank 0 has written there: a checkpoint would be split over the machines. Give a" in first
    assert second.startswith("local: 1 of 2 ranks, such as 1 on ")
    assert [path.name for path in tmp_path.glob("near-*/*")] == []


@pytest.mark.prove
def test_processes_of_ranks_write_what_threads_do(tmp_path: Path) -> None:
    """The death of one is heard on all ranks, and does not end the others."""
    assert rank_programs.run_ranks(manager_programs.flush_in_processes, 2, tmp_path) == [0, 0]
    (first, *steps), (second, *others) = said(tmp_path, "flushed", 2)
    assert first.startswith("PeerError: rank 1 failed: CheckpointError: the process that writes checkpoints (pid ")
    assert second.startswith("CheckpointError: the process that writes checkpoints (pid ")
    assert "was killed by SIGKILL" in second
    assert steps == others == [[1, 2], [1, 2, 4], []]
    steps_of = [f"step-{number:010d}" for number in (1, 2)]
    for name in [f"{step}/__{rank}_0.distcp" for step in steps_of for rank in range(2)]:
        assert (tmp_path / "process" / name).read_bytes() == (tmp_path / "thread" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "process").iterdir()) == [*steps_of, "step-0000000004"]
    assert rank_programs.run_ranks(manager_programs.flush_without_address, 2, tmp_path) == [0, 0]
    assert all("a FileStore has no address" in message for message in said(tmp_path, "refused", 2))


def test_all_ranks_skip_a_save_and_save_it_when_it_is_tried_again(tmp_path: Path) -> None:
    assert rank_programs.run_ranks(manager_programs.skip_when_busy, 2, tmp_path) == [0, 0]
    for found, steps in said(tmp_path, "skipped", 2):
        assert found[0:6:2] == [True] * 3
        assert len(set(found[1:6:2])) == 1  # what was said of the steps before is not on the board any more
        assert found[6] == 3
        assert steps == [0, 1, 2, 3]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("victim", "flush", "local"), [(0, "thread", False), (1, "thread", True), (1, "process", False)]
)
def test_a_rank_that_leaves_by_an_error_is_named_at_once(victim: int, flush: str, local: bool, tmp_path: Path) -> None:
    """The others would wait for 11 days, and it for them: `timeout_s`."""
    assert rank_programs.run_ranks(manager_programs.leave_by_an_error, 2, tmp_path, victim, flush, local) == [0, 0]
    found = said(tmp_path, "left", 2)
    assert found[victim][0] == "ZeroDivisionError: the loss is nan"
    reason = "has left the block of its CheckpointManager by ZeroDivisionError: the loss is nan"
    assert found[1 - victim][0].startswith(f"PeerError: rank {victim} {reason} (while a checkpoint is ")
    assert found[1 - victim][1] == ["step-0000000001"]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_restore_does_not_wait_for_a_rank_that_has_left(victim: int, tmp_path: Path) -> None:
    assert rank_programs.run_ranks(manager_programs.leave_before_a_restore, 2, tmp_path, victim) == [0, 0]
    found = said(tmp_path, "left", 2)
    reason = "has left the block of its CheckpointManager by ZeroDivisionError: the loss is nan"
    assert found[1 - victim].startswith(f"PeerError: rank {victim} {reason}")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_s_optimizer_is_refused_with_the_remedy_which_helps(use_orig_params: bool, tmp_path: Path) -> None:
    assert rank_programs.run_ranks(manager_programs.refuse_fsdp1, 2, tmp_path, use_orig_params) == [0, 0]
    for messages, step, is_same in said(tmp_path, "refused", 2):
        assert messages[0].startswith(
            "ConfigError: state: the optimizer 'optimizer' is of a model under FSDP1, and has on each "
        )
        assert messages[1].startswith("ConfigError: state: 'optimizer.state.")
        assert "is a ShardedTensor, as FSDP1 gives them, which is not restored" in messages[1]
        assert all("get_optimizer_state_dict(model, optimizer, options=" in message for message in messages)
        assert (step, is_same) == (3, True)
