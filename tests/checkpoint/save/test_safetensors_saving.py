"""Checkpoints as safetensors: equal to the last bit, read by safetensors and transformers, whole or not at all."""

from __future__ import annotations

import importlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import DTYPES, NAMES, random_tensor, same, tensors
from crashing import Clock, DeadError, Mortal, made_store, names_in, number_in, state_of
from hypothesis import given
from hypothesis import strategies as st
from power_cut import DroppingConnector
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit.checkpoint import RngState, StreamWriter, latest
from loaderkit.checkpoint.save.safetensors import layout
from loaderkit.connectors.base import Connector
from loaderkit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS = ["file", "memory", "memory-in-place", "power-cut"]
MOST_OPERATIONS = 45


def write(state: dict[str, Any], path: Path | str, **settings: Any) -> None:
    save(state, storage_writer=StreamWriter(path, format="safetensors", **settings), no_dist=True)


def read_files(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of all files, by safetensors' own reader."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@given(
    st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), tensors(), min_size=1, max_size=6),
    st.dictionaries(
        st.sampled_from("nxyz"), st.integers() | st.text() | st.tuples(st.floats(allow_nan=False)), max_size=3
    ),
)
def test_equal_to_the_last_bit(model: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step-1"
        write({"model": model, "values": values}, path)
        found = load_file(path / "model.safetensors")
        assert found.keys() == model.keys()
        assert all(same(found[name], tensor) for name, tensor in model.items())
        restored = loaderkit.restore(path, verify=True, nested=True)
        assert restored["model"].keys() == model.keys()
        assert all(same(restored["model"][name], tensor) for name, tensor in model.items())
        assert restored.get("values", {}) == values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced", "empty", "0-dim"])
def test_all_dtypes(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    shape = {"empty": (3, 0, 2), "0-dim": ()}.get(kind, (5, 4, 6))
    tensor = random_tensor(dtype, shape, 1)
    if kind in ("transposed", "sliced"):
        tensor = tensor.permute(2, 0, 1) if kind == "transposed" else tensor[1:, ::2]
    others = {f"{number}": random_tensor(other, (3,), number) for number, other in enumerate(DTYPES)}
    write({"m": {"t": tensor, **others}}, tmp_path / "a")
    found = load_file(tmp_path / "a" / "m.safetensors")
    assert same(found["t"], tensor)
    assert all(same(found[name], other) for name, other in others.items())


def test_parts_of_files_of_several_parts(tmp_path: Path) -> None:
    """Larger than one part of a file, in many workers, with types of other sizes before and after."""
    model = {
        "odd": random_tensor(torch.uint8, (1_000_003,), 1),
        "wide": random_tensor(torch.int64, (1500, 1999), 2),
        "cut": random_tensor(torch.bfloat16, (3001, 2003), 3).T,
        "flags": random_tensor(torch.bool, (777, 3), 4),
    }
    write({"model": model}, tmp_path / "a", workers=3)
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert all(same(found[name], tensor) for name, tensor in model.items())
    assert all(same(tensor, model[name[6:]]) for name, tensor in loaderkit.restore(tmp_path / "a", verify=True).items())


def test_a_type_that_safetensors_has_not(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(2, dtype=torch.complex128)}}
    with pytest.raises(CheckpointException, match=r"(?s)'model\.w' is of torch.complex128.*use format dcp"):
        write(state, tmp_path / "a")
    with (
        loaderkit.CheckpointManager(tmp_path / "run", format="safetensors") as checkpoints,
        pytest.raises(ConfigError, match=r"'model\.w' is of torch.complex128"),
    ):
        checkpoints.save(1, state)


def test_other_tensors_and_values_that_cannot_be_held(tmp_path: Path) -> None:
    with loaderkit.CheckpointManager(tmp_path / "run", format="safetensors") as checkpoints:
        for value, said in (
            (torch.eye(2).to_sparse(), "'a.b' is a torch.sparse_coo tensor"),
            ([torch.float32], "torch.dtype"),
        ):
            with pytest.raises(ConfigError, match=said):
                checkpoints.save(1, {"a": {"b": value}})
        assert checkpoints.all_steps() == []
    with pytest.raises(CheckpointException, match=r"(?s)'a\.__metadata__': rename it|named 'a\.__metadata__'"):
        write({"a": {"__metadata__": torch.zeros(1)}}, tmp_path / "b")
    with pytest.raises(ConfigError, match="format 'pickle'"):
        StreamWriter(tmp_path, format="pickle")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"format.*'dcp' or 'safetensors'"):
        loaderkit.CheckpointManager(tmp_path / "run", format="zip")
    with pytest.raises(CheckpointException, match="keeps plans"):
        for _ in range(2):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            writer = StreamWriter(tmp_path / "c", format="safetensors")
            save({"a": torch.zeros(1)}, storage_writer=writer, planner=planner, no_dist=True)


def test_names_of_parts_are_names_of_files(tmp_path: Path) -> None:
    parts = ["model", "a/b", "x.1", "..", "ü ", "", "long" * 40, "tensors"]
    state: dict[str, Any] = {part: {"w": torch.tensor(number)} for number, part in enumerate(parts)}
    write(state | {"top": torch.tensor(9)}, tmp_path / "a")
    found = loaderkit.restore(tmp_path / "a", verify=True, nested=True)
    assert {part: int(found[part]["w"]) for part in parts} == {part: number for number, part in enumerate(parts)}
    assert found["top"] == 9
    names = {path.name for path in (tmp_path / "a").glob("*.safetensors")}
    assert {"model.safetensors", "a%2Fb.safetensors", "tensors_.safetensors"} <= names
    assert len(names) == len(parts) + 1
    write({"x.weight": torch.ones(2), "y": torch.ones(3), "n": 1}, tmp_path / "flat")
    assert load_file(tmp_path / "flat" / "model.safetensors").keys() == {"x.weight", "y"}


# ------------------------------------------------------------------------------------------------- the manager's state


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("part", self.embed.weight.detach()[:3])  # overlaps, and is another tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(ids))
        return logits


def test_the_state_of_training_and_tied_tensors(tmp_path: Path, rng: random.Random) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    schedule.step()
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "rng": RngState(), "note": (1, b"x")}
    with loaderkit.CheckpointManager(tmp_path / "run", format="safetensors") as checkpoints:
        checkpoints.save(3, state, metrics={"loss": 0.5})
        after = torch.rand(3)
        checkpoints.wait_until_finished()
        step = tmp_path / "run" / "step-0000000003"
        assert load_file(step / "model.safetensors").keys() == {"embed.weight", "part"}
        with safe_open(step / "model.safetensors", "pt") as file:
            assert file.metadata()["head.weight"] == "embed.weight"
            assert file.metadata()["format"] == "pt"
        other = Tied()
        load_model(other, step / "model.safetensors", strict=False)
        assert torch.equal(other.head.weight, model.head.weight)
        fresh = Tied()
        new = torch.optim.Adam(fresh.parameters(), lr=1.0, amsgrad=True)
        into: dict[str, Any] = {
            "model": fresh,
            "optimizer": new,
            "schedule": torch.optim.lr_scheduler.OneCycleLR(new, 1.0, total_steps=3),
            "rng": RngState(),
            "note": None,
        }
        assert checkpoints.restore(into) == 3
    assert torch.equal(torch.rand(3), after)
    assert fresh.head.weight is fresh.embed.weight
    assert all(same(tensor, model.state_dict()[name]) for name, tensor in fresh.state_dict().items())
    assert into["note"] == (1, b"x")
    assert into["schedule"].state_dict() == schedule.state_dict()
    saved, found = optimizer.state_dict(), new.state_dict()
    assert found["param_groups"] == saved["param_groups"]
    assert found["state"].keys() == saved["state"].keys() == {0}
    assert all(same(value, saved["state"][0][key]) for key, value in found["state"][0].items())
    restored = loaderkit.restore(step, verify=True)
    assert torch.equal(restored["model.head.weight"], restored["model.embed.weight"])
    assert restored["loaderkit.metrics.loss"] == 0.5
    assert b"pickle" not in (step / "loaderkit-state.json").read_bytes()


@pytest.mark.integration
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_from_pretrained_of_the_directory(
    ties: bool, is_sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=ties,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    if is_sharded:
        monkeypatch.setattr(layout, "MAX_FILE_BYTES", 10_000)
    with loaderkit.CheckpointManager(tmp_path / "run", format="safetensors") as checkpoints:
        for _ in range(2):  # the second time in the place of the first
            with torch.no_grad():
                model.model.norm.weight += 1
            checkpoints.save(1, {"model": model, "optimizer": optimizer}, force=True, wait=True)
            step = tmp_path / "run" / "step-0000000001"
            for loaded in (
                transformers.LlamaForCausalLM.from_pretrained(step),
                transformers.AutoModelForCausalLM.from_pretrained(step),
            ):
                assert type(loaded) is type(model)
                state = loaded.state_dict()
                assert state.keys() == model.state_dict().keys()
                assert all(same(state[name], tensor) for name, tensor in model.state_dict().items())
    files = list(step.glob("model*.safetensors"))
    assert (len(files) > 1) == is_sharded
    index = json.loads((step / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for path in files for tensor in load_file(path).values()
    )


@pytest.mark.parametrize("has_local", [False, True])
def test_the_same_step_again_and_a_local_directory(has_local: bool, tmp_path: Path) -> None:
    local: Any = {"local": tmp_path / "fast"} if has_local else {}
    state: dict[str, Any] = {"model": {"w": torch.zeros(3)}, "n": 0}
    with loaderkit.CheckpointManager(tmp_path / "run", format="safetensors", keep={"last": 2}, **local) as checkpoints:
        for number, step in enumerate((1, 2, 2, 3), 1):
            state["model"]["w"].fill_(number)
            checkpoints.save(step, state | {"n": number}, force=True, wait=True)
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [2, 3]
        for step, number in ((2, 3), (3, 4)):
            into: dict[str, Any] = {"model": {"w": torch.zeros(3)}, "n": 0}
            assert checkpoints.restore(into, step) == step
            assert (into["n"], into["model"]["w"].tolist()) == (number, [number] * 3)
    restored = loaderkit.restore(tmp_path / "run" / "step-0000000003", verify=True)
    assert restored["model.w"].tolist() == [4, 4, 4]


# ------------------------------------------------------------------------------------------- whole, or not at all


def save_to(store: Connector, name: str, number: int) -> None:
    state = state_of(number) | {f"part-{number % 2}": {"v": torch.ones(number)}}
    write(state, f"given://{name}", connectors={"given": store})


def mortal(store: Connector, kind: str, clock: Clock) -> Mortal:
    return Mortal(store, clock, renames=kind != "memory-in-place")


def newest(store: Connector) -> str:
    return latest("given://", connectors={"given": store}).rpartition("/")[2]


def files_of(store: Connector, name: str) -> set[str]:
    return {key.partition("/")[2] for key in names_in(store) if key.startswith(f"{name}/")}


def is_clean(store: Connector, steps: set[str]) -> bool:
    """True if these steps have the files that they name and no others, and nothing else is there."""
    for name in steps:
        key = f"{name}/loaderkit-state.json"
        data = bytearray(store.stat(key).size)
        store.read_into(key, 0, memoryview(data))
        files = json.loads(data)["files"]
        own = {*files, *(file["index"] for file in files.values() if file["index"])}
        if files_of(store, name) != own | {"loaderkit-state.json", "loaderkit-manifest.json"}:
            return False
    return {key.partition("/")[0] for key in names_in(store)} == steps


@pytest.mark.matrix(3)
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_at_operations(
    kind: str, again: bool, rng: random.Random, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(layout, "MAX_FILE_BYTES", 30_000)  # several files for the model
    for operation in sorted(rng.sample(range(MOST_OPERATIONS), 12)):
        with made_store(kind) as store:
            is_before = rng.random() < 0.5
            save_to(mortal(store, kind, Clock()), "step-1", 1)
            name, clock = "step-1" if again else "step-2", Clock(operation, is_before=is_before)
            try:
                save_to(mortal(store, kind, clock), name, 2)
            except CheckpointException as error:
                if not isinstance(error.failures[0][0], DeadError):
                    raise
            if isinstance(store, DroppingConnector):
                store.cut(rng if operation % 2 else None)
            found = newest(store)
            number = number_in(store, found)
            assert found in ("step-1", name)
            assert number in (1, 2) if again else number == int(found[-1])
            if not clock.is_dead:
                assert (found, number) == (name, 2)
            after = rng.choice([name, "step-3"])
            save_to(mortal(store, kind, Clock()), after, 3)
            assert number_in(store, after, verify=True) == 3
            steps = {"step-1", after}
            if name not in steps and f"{name}/loaderkit-state.json" in names_in(store):
                steps.add(name)
            assert is_clean(store, steps), (operation, is_before, names_in(store))


@pytest.mark.parametrize("kind", KINDS)
def test_no_save_has_more_operations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_FILE_BYTES", 30_000)
    with made_store(kind) as store:
        for number in range(3):
            clock = Clock()
            save_to(mortal(store, kind, clock), "step-1", number)
            assert MOST_OPERATIONS / 3 < len(clock.names) <= MOST_OPERATIONS, clock.names


def test_a_first_save_that_died_is_no_checkpoint(tmp_path: Path) -> None:
    with made_store("memory-in-place") as store:
        for operation in range(2, 9):
            with pytest.raises(CheckpointException):
                save_to(mortal(store, "memory-in-place", Clock(operation)), "step-1", 1)
            with pytest.raises(CheckpointError, match=r"no complete checkpoint|no such file"):
                newest(store)


def test_two_formats_do_not_mix(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}}
    write(state, tmp_path / "a")
    save(state, storage_writer=StreamWriter(tmp_path / "b"), no_dist=True)
    for name, other in (("a", "dcp"), ("b", "safetensors")):
        writer = StreamWriter(tmp_path / name, format=other)  # type: ignore[arg-type]
        with pytest.raises(CheckpointException, match="a checkpoint of another format"):
            save(state, storage_writer=writer, no_dist=True)
        assert loaderkit.restore(tmp_path / name, verify=True)["model.w"].eq(1).all()
    foreign = tmp_path / "c"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes((tmp_path / "a" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointException, match="a checkpoint of another format"):
        write(state, foreign)
    with pytest.raises(CheckpointError, match="not committed, or a file of it was copied"):
        loaderkit.restore(foreign)
    assert loaderkit.restore(foreign / "model.safetensors")["w"].eq(1).all()


def test_what_is_not_whole_is_said_to_be(tmp_path: Path) -> None:
    write({"model": {"w": torch.ones(2)}, "other": {"v": torch.ones(3)}}, tmp_path / "a")
    file = tmp_path / "a" / "other.safetensors"
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"not whole.*'other\.safetensors'"):
        loaderkit.restore(tmp_path / "a")
    file.write_bytes((tmp_path / "a" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="has other tensors than"):
        loaderkit.restore(tmp_path / "a", verify=False)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        loaderkit.restore(tmp_path / "a")
