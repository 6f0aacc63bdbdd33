"""`ranks: {share: broadcast}`: one rank of those that need the same batches reads; all get what each would have read."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import mesh_programs
import mesh_scenarios
import pytest
import rank_programs
from mesh_programs import BROADCAST, NUM_SAMPLES, Store, as_rank, digest, files
from mesh_scenarios import is_kept, numbers, of_numbers, walk
from torch.distributed.device_mesh import init_device_mesh

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
MESH = (2, 2, 2)  # pipeline, data and tensor parallel
TOTAL_BYTES = sum(100 + 37 * n for n in range(NUM_SAMPLES))


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def read_alone(rank: int, world_size: int, state: Any = None) -> list[Any]:
    """The batches of two epochs, or from `state` on, of a loader that reads for itself."""
    with loaderkit.build(files(), rank=rank, world_size=world_size, connectors={"store": Store()}) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [digest(batch) for _ in range(loader.epoch, 2) for batch in loader]


def samples_of(batches: list[list[Any]]) -> list[int]:
    """The samples of ranks that take turns, in the global order."""
    rows = [[size for batch in one for size in batch["size"]] for one in batches]
    return [size for sizes in zip(*rows, strict=True) for size in sizes]


def test_eight_ranks_read_everything_once(tmp_path: Path) -> None:
    """The batches of each group are those of its data rank, and the store is read once, not four times; a state of two data
    ranks continues at four and at one."""
    exit_codes = rank_programs.run_ranks(mesh_programs.read_all, 8, tmp_path, MESH, BROADCAST)
    assert exit_codes == [0] * 8
    told = mesh_programs.told(tmp_path, 8)
    for rank in range(8):
        place = rank // 2 % 2
        assert told[rank]["batches"] == as_json(read_alone(place, 2)), "order, tensors, numbers, texts, random numbers"
        assert told[rank]["states"] == told[0]["states"]
        assert told[rank]["num_batches"] == len(told[rank]["batches"]) == 24
        reads = rank in (0, 2)
        assert [*told[rank]["rows"]] == (["read", "call", "batch", "share"] if reads else ["share"])
        assert told[rank]["rows"]["share"] == 2 * -(-NUM_SAMPLES // 2)
        assert set(told[rank]["waited"]) <= {*told[rank]["rows"], "start", "wakeup", "memory"}
        assert reads or not told[rank]["num_bytes"]
    first = 100 + 37 * int(read_alone(0, 1)[0]["bin"][0][:2], 16)  # which each reader has looked at for its shapes
    num_bytes = sum(one["num_bytes"] for one in told)
    assert num_bytes <= 2 * TOTAL_BYTES + 2 * first + 2000, "1.0 times the two epochs"
    state = told[0]["states"][4]
    rest = samples_of([one["batches"][5:] for one in (told[0], told[2])])
    for world_size in (1, 4):
        others = samples_of([read_alone(rank, world_size, state) for rank in range(world_size)])
        assert others[: NUM_SAMPLES - state["position"]] == rest[: NUM_SAMPLES - state["position"]]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("victim", [0, 2, 5, 6], ids=["a reader", "the other reader", "within the tree", "a leaf"])
def test_a_killed_rank_is_named_by_the_others(tmp_path: Path, victim: int) -> None:
    """By those that needed the same batches: the other group goes on to its end."""
    exit_codes = rank_programs.run_ranks(mesh_programs.die, 8, tmp_path, victim, 3)
    assert exit_codes[victim] == -signal.SIGKILL
    told = mesh_programs.told(tmp_path, 8)
    group = [rank for rank in range(8) if rank // 2 % 2 == victim // 2 % 2 and rank != victim]
    for rank in group:
        kind, message, ranks, _ = told[rank]
        assert kind == "PeerError"
        assert ranks == [victim]
        assert f"rank {victim} has died" in message
    assert all(told[rank] is None for rank in range(8) if rank not in group)


@pytest.mark.prove
def test_a_lost_machine_is_named_within_the_timeout(tmp_path: Path) -> None:
    """Its connections stay open, and it gives no sign of life any more."""
    exit_codes = rank_programs.run_ranks(mesh_programs.stop_answering, 3, tmp_path, patience_s=40)
    assert exit_codes == [0, None, 0]
    told = mesh_programs.told(tmp_path, 3)
    for rank in (0, 2):
        assert told[rank][0] == "PeerError"
        assert told[rank][2] == [1]
        assert "rank 1 has given no sign of life for 6 s" in told[rank][1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks wrote down in all scenarios, run in the same processes: starting them takes the most time."""
    folder = tmp_path_factory.mktemp("scenarios")
    names = [name for name in mesh_scenarios.SCENARIOS if name != "processes"]
    assert rank_programs.run_ranks(mesh_scenarios.run_all, 4, folder, names, patience_s=300) == [0] * 4
    return folder


def alone(pipeline: Pipeline, **overrides: Any) -> Any:
    overrides = {name.replace("__", "."): value for name, value in overrides.items()}
    return loaderkit.build(pipeline, rank=0, world_size=1, overrides=overrides, connectors={"store": Store()})


def test_breaks_jumps_and_states(folder: Path) -> None:
    with alone(files()) as loader:
        wanted = as_json(walk(loader))
    assert mesh_scenarios.told(folder, "threads") == [wanted] * 4


@pytest.mark.prove
def test_loading_processes(tmp_path: Path) -> None:
    exit_codes = rank_programs.run_ranks(mesh_scenarios.run_all, 4, tmp_path, ["processes"], patience_s=300)
    assert exit_codes == [0] * 4
    with alone(files()) as loader:
        assert mesh_scenarios.told(tmp_path, "processes") == [as_json(walk(loader))] * 4


def test_the_reports(folder: Path) -> None:
    reader, *others = mesh_scenarios.told(folder, "profiles")
    assert reader["stages"] == ["read", "call", "batch", "share"]
    assert reader["refused"] == []
    assert reader["tuning"]["reader"] == 0
    assert reader["tuning"]["peers"] == [1, 2, 3]
    for other in others:
        assert other["stages"] == ["share"]
        assert set(other["stall"]) <= {"share", "start", "wakeup", "release"}
        assert "rank 0 reads for this rank" in other["refused"][1]
    for one in (reader, *others):
        assert one["total"][0] == pytest.approx(one["total"][1])
        assert "share: broadcast" in one["yaml"]


class TestBadSamples:
    def test_an_error_is_raised_on_all_ranks(self, folder: Path) -> None:
        for rank, (error, position, again) in enumerate(mesh_scenarios.told(folder, "raises")):
            assert error[:2] == ["StageError", "call failed for sample '59' in list: 59 is a bad one"]
            assert again[:2] == ["StageError", "call failed for sample '38' in list: 38 is a bad one"]
            assert position == 0
            notes = "\n".join(error[3])
            assert ("This is the error of rank 0, which reads the batches that this rank needs." in notes) is (rank > 0)

    @pytest.mark.parametrize("policy", ["skip", "replace"])
    def test_are_skipped_or_replaced_alike(self, folder: Path, policy: str) -> None:
        with alone(numbers(), errors__on_bad_sample=policy) as loader:
            wanted = [of_numbers(batch) for batch in loader]
        assert mesh_scenarios.told(folder, f"{policy}s") == [wanted] * 4

    def test_are_recorded_once(self, folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
        assert sorted(int(line["key"]) for line in lines) == [number for number in range(60) if number % 7 == 3]

    def test_too_many(self, folder: Path) -> None:
        errors = mesh_scenarios.told(folder, "too_many")
        assert errors == [errors[0]] * 4
        assert errors[0][0] == "TooManyBadSamplesError"


def test_empty_batches_are_skipped_alike(folder: Path) -> None:
    pipeline = Pipeline.dataset(list(range(60))).shuffle("none").read().filter(is_kept, on_empty_batch="skip").batch(2)
    with alone(pipeline.epochs(2)) as loader:
        wanted = [of_numbers(batch) for _ in range(2) for batch in loader]
    assert mesh_scenarios.told(folder, "filters") == [wanted] * 4


def test_iterables_and_their_states(folder: Path) -> None:
    told = mesh_scenarios.told(folder, "iterables")
    assert told == [told[0]] * 4
    seen, state, rest = told[0]
    assert [value for batch in seen for value in batch] == [*range(50), *range(20)]
    assert state["source"] == [{"next": 24}]
    assert [value for batch in rest for value in batch] == [*range(24, 50)]


class TestErrors:
    def test_what_cannot_be_sent(self, folder: Path) -> None:
        for kind, message, *_ in mesh_scenarios.told(folder, "unsendable"):
            assert kind == "StageError"
            assert "cannot be passed on to other ranks: its field 'lock', a list, cannot be sent" in message

    def test_pipelines_that_differ(self, folder: Path) -> None:
        for kind, message, *_ in mesh_scenarios.told(folder, "differ"):
            assert kind == "ConfigError"
            assert "rank 2 and rank 0 are to get the same batches, and their pipelines differ: the batch" in message

    def test_ranks_that_go_apart(self, folder: Path) -> None:
        for kind, message, ranks, _ in mesh_scenarios.told(folder, "go_apart"):
            assert (kind, ranks) == ("PeerError", [3])
            assert "rank 3 is at position 8 of epoch 0, and rank 0, which reads for it, went on to" in message

    def test_a_rank_that_leaves(self, folder: Path) -> None:
        for rank, (num, error) in enumerate(mesh_scenarios.told(folder, "leave")):
            if rank == 1:
                assert (num, error) == (2, [])
                continue
            assert 2 <= num <= 2 + 2 + 1 + 1, "what was on its way before comes"
            assert error[0] == "PeerError"
            assert error[2] == [1]
            assert "rank 1 has left the loop before this one" in error[1]

    def test_a_stage_that_hangs(self, folder: Path) -> None:
        for kind, *_ in mesh_scenarios.told(folder, "times_out"):
            assert kind == "StallTimeout"

    def test_what_cannot_be_shared(self) -> None:
        with as_rank(1, 2):
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
            arguments: dict[str, Any] = {"mesh": mesh, "data_dims": "dp"}
            with pytest.raises(ConfigError, match="passes batches on by a thread, and"):
                loaderkit.build(numbers().ranks(share="broadcast").prefetch(executor="inline"), **arguments)
            with loaderkit.build(numbers().prefetch(executor="inline"), **arguments) as loader:
                assert loader.config.ranks.share == "read"


def test_closing(folder: Path) -> None:
    for left, message in mesh_scenarios.told(folder, "closes"):
        assert left == []
        assert message.startswith("the loader is closed")


def test_no_rank_cuts_connections_while_another_connects(folder: Path) -> None:
    told = mesh_scenarios.told(folder, "closes_while_connecting")
    assert told[:3] == [[]] * 3
    assert len(told[3]) == 1
    assert "Timed out" in told[3][0], "nothing came, and the connection was there"


def test_nothing_is_shared_where_no_rank_needs_the_same(folder: Path) -> None:
    for names, rows, reader in mesh_scenarios.told(folder, "alone"):
        assert [name for name in names if not name.startswith("loaderkit-ahead")] == [
            "loaderkit-monitor",
            "loaderkit-read+call+batch-0",
        ]
        assert rows == ["read", "call", "batch"]
        assert reader is None
