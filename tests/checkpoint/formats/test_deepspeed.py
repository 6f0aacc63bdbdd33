"""Folders of DeepSpeed's ZeRO are read merged, of any number of ranks; what is not whole, or cut by other means, is refused."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import same
from deepspeed_folders import deepspeed_classes, write_zero
from malformed import Evil

import loaderkit
from loaderkit.checkpoint import latest, write_manifest
from loaderkit.checkpoint.save.copy import copy_checkpoint
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError, FormatError

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def made(folder: Path, stage: int, num_ranks: int, seed: int = 0, **settings: Any) -> dict[str, Any]:
    """Write a folder of a made-up run; the whole state that it holds."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def drawn(num: int, prefix: str) -> dict[str, torch.Tensor]:
        shapes = [tuple(rng.randrange(1, 6) for _ in range(rng.randrange(0, 4))) for _ in range(num)]
        return {f"{prefix}.{n}.w": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}

    groups = [drawn(rng.randrange(1, 6), f"group{n}") for n in range(rng.randrange(1, 4))]
    whole = {name: tensor for group in groups for name, tensor in group.items()}
    states = {
        kind: {name: torch.randn(tensor.shape, generator=generator) for name, tensor in whole.items()}
        for kind in ("exp_avg", "exp_avg_sq")
    }
    frozen, buffers = drawn(2, "frozen"), drawn(2, "buffer")
    tied = {"head.weight": next(iter(whole))}
    write_zero(
        folder, stage, num_ranks, groups, states, frozen=frozen, buffers=buffers, tied=tied,
        sub_group=rng.randrange(1, 4), gap=rng.randrange(0, 3), **settings,
    )  # fmt: skip
    flat: dict[str, Any] = {f"module.{name}": tensor for name, tensor in {**buffers, **whole, **frozen}.items()}
    flat["module.head.weight"] = whole[tied["head.weight"]]
    for name in whole:
        flat[f"optimizer.state.{name}.step"] = torch.tensor(3.0)
        flat |= {f"optimizer.state.{name}.{kind}": named[name] for kind, named in states.items()}
    for number, group in enumerate(groups):
        flat[f"optimizer.param_groups.{number}.lr"] = 0.1 * (number + 1)
        flat[f"optimizer.param_groups.{number}.params"] = [*group]
    return {**flat, "global_steps": 3}


def assert_equal(restored: dict[str, Any], expected: dict[str, Any]) -> None:
    assert restored.keys() == expected.keys()
    assert [name for name in expected if not same(restored[name], expected[name])] == []


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_all_ranks_are_merged(stage: int, num_ranks: int, tmp_path: Path) -> None:
    for seed in range(4):
        folder = tmp_path / f"global_step{seed}"
        expected = made(folder, stage, num_ranks, seed)
        assert_equal(loaderkit.restore(folder), expected)
        name = random.Random(seed).choice([*expected])
        assert_equal(loaderkit.restore(folder, keys=name), {name: expected[name]})
    state = loaderkit.restore(folder, nested=True)
    assert state["optimizer"]["state"].keys() | {"head.weight"} <= state["module"].keys()
    steps = [one["step"] for one in state["optimizer"]["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps), "each is counted up by itself"


def test_in_place_and_from_another_store(tmp_path: Path) -> None:
    expected = made(tmp_path / "run" / "global_step3", 3, 2)
    weights = {name: torch.zeros_like(tensor) for name, tensor in expected.items() if name.startswith("module.")}
    loaderkit.restore(tmp_path / "run" / "global_step3", into=weights, keys="module.*")
    assert_equal(weights, {name: expected[name] for name in weights})
    store = MemoryConnector()
    for path in (tmp_path / "run" / "global_step3").iterdir():
        store.put(f"run/global_step3/{path.name}", path.read_bytes())
    assert_equal(loaderkit.restore("memory://run/global_step3", connectors={"memory": store}), expected)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
class TestIntoAModel:
    """What the page on DeepSpeed says of the ways to load a run into a model and its optimizer."""

    def written(self, folder: Path, stage: int, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
        """The model that a folder holds, and the moments by kind and name."""
        model, optimizer = trained()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        moments = {
            kind: {name: optimizer.state[weight][kind] for name, weight in model.named_parameters()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        buffers = {n: b.to(dtype) if b.is_floating_point() else b for n, b in model.named_buffers()}
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)  # as it comes back: rounded
        write_zero(folder / "global_step3", stage, 2, [weights], moments, frozen={}, buffers=buffers, tied={})
        return model, moments

    def assert_loaded(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        expected: torch.nn.Module,
        moments: dict[str, Any],
    ) -> None:
        assert_equal(model.state_dict(), expected.state_dict())
        for name, weight in model.named_parameters():
            assert optimizer.state[weight]["step"] == 3
            assert all(same(optimizer.state[weight][kind], named[name]) for kind, named in moments.items())

    def test_by_position(self, stage: int, buffer_dtype: torch.dtype, tmp_path: Path) -> None:
        expected, moments = self.written(tmp_path, stage, buffer_dtype)
        model, optimizer = trained()
        state = loaderkit.restore(latest(tmp_path), keys=["module.*", "optimizer.*"], nested=True)
        assert state["module"]["1.running_mean"].dtype == buffer_dtype
        model.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        self.assert_loaded(model, optimizer, expected, moments)

    def test_in_place_as_the_types_of_the_model(self, stage: int, buffer_dtype: torch.dtype, tmp_path: Path) -> None:
        expected, _ = self.written(tmp_path, stage, buffer_dtype)
        model, _ = trained()
        loaderkit.restore(latest(tmp_path), into={"module": model.state_dict()}, keys="module.*", dtype="target")
        assert_equal(model.state_dict(), expected.state_dict())

    def test_by_name(self, stage: int, buffer_dtype: torch.dtype, tmp_path: Path) -> None:
        expected, moments = self.written(tmp_path, stage, buffer_dtype)
        model, _ = trained()
        optimizer = torch.optim.AdamW(reversed([*model.parameters()]))
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            if buffer_dtype != torch.float32:
                before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                with pytest.raises(CheckpointError, match=r"running_mean' is torch\.float32, and torch\.bfloat16"):
                    checkpoints.restore({"module": model, "optimizer": optimizer})
                assert_equal(model.state_dict(), before)
                return
            assert checkpoints.restore({"module": model, "optimizer": optimizer}) == 3
        self.assert_loaded(model, optimizer, expected, moments)


class TestWhichFolder:
    def test_latest_names_it(self, tmp_path: Path) -> None:
        old, new = made(tmp_path / "global_step9", 2, 2, 1), made(tmp_path / "global_step10", 2, 3, 2)
        (tmp_path / "zero_to_fp32.py").write_text("raise SystemExit")
        (tmp_path / "latest").write_text("global_step9")
        assert_equal(loaderkit.restore(tmp_path), old)
        assert latest(tmp_path) == f"{tmp_path}/global_step10"
        assert_equal(loaderkit.restore(latest(tmp_path)), new)

    def test_latest_may_name_a_number(self, tmp_path: Path) -> None:
        expected = made(tmp_path / "0010", 2, 2)  # the tag that was given to save_checkpoint
        (tmp_path / "latest").write_text("0010")
        assert_equal(loaderkit.restore(tmp_path), expected)

    @pytest.mark.parametrize("text", ["global_step8", "", "..", "../elsewhere", "a/b", "x" * 2000])
    def test_it_may_lead_nowhere(self, text: str, tmp_path: Path) -> None:
        made(tmp_path / "run" / "global_step9", 2, 2)
        (tmp_path / "run" / "latest").write_text(text)
        with pytest.raises(CheckpointError, match=r"latest (says that|names)"):
            loaderkit.restore(tmp_path / "run")

    def test_weights_beside_it_come_first(self, tmp_path: Path) -> None:
        made(tmp_path / "global_step9", 2, 2)
        (tmp_path / "latest").write_text("global_step9")
        torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
        assert [*loaderkit.restore(tmp_path)] == ["a"]

    def test_manifest_and_copy_are_of_the_folder(self, tmp_path: Path) -> None:
        expected = made(tmp_path / "run" / "global_step9", 3, 2)
        (tmp_path / "run" / "latest").write_text("global_step9")
        write_manifest(tmp_path / "run")
        assert (tmp_path / "run" / "global_step9" / "loaderkit-manifest.json").exists()
        assert_equal(loaderkit.restore(tmp_path / "run", verify=True), expected)
        copied = copy_checkpoint(tmp_path / "run", tmp_path / "copies")
        assert copied.url == f"{tmp_path}/copies/global_step9"
        assert_equal(loaderkit.restore(copied.url, verify=True), expected)
        damaged = tmp_path / "run" / "global_step9" / OPTIMIZER.format(1)
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(CheckpointError):
            loaderkit.restore(tmp_path / "run")


class TestNotWhole:
    @pytest.mark.parametrize("stage", [2, 3])
    def test_a_rank_is_missing(self, stage: int, tmp_path: Path) -> None:
        for rank in range(3):
            folder = tmp_path / f"step-{rank}"
            made(folder, stage, 3)
            (folder / OPTIMIZER.format(rank)).unlink()
            with pytest.raises((CheckpointError, FormatError), match="missing"):
                loaderkit.restore(folder)
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            latest(tmp_path)

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_the_whole_optimizer_is_missing(self, stage: int, tmp_path: Path) -> None:
        # DeepSpeed writes these files last, so that a job which dies while it saves leaves such a folder.
        expected = made(tmp_path / "step-1", stage, 1)
        made(tmp_path / "step-2", stage, 1)
        (tmp_path / "step-2" / OPTIMIZER.format(0)).unlink()
        with pytest.raises(CheckpointError, match=r"is not whole: .*no zero_pp_rank_\*_optim_states.pt"):
            loaderkit.restore(tmp_path / "step-2")
        assert latest(tmp_path) == f"{tmp_path}/step-1"
        if stage < 3:
            named = loaderkit.restore(tmp_path / "step-2" / "mp_rank_00_model_states.pt", keys="module.*")
            assert named.keys() == {name for name in expected if name.startswith("module.")}

    def test_a_part_of_what_is_not_trained_is_missing(self, tmp_path: Path) -> None:
        for rank in (1, 2):
            made(tmp_path / f"{rank}", 3, 3)
            (tmp_path / f"{rank}" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
            with pytest.raises(FormatError, match=f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt is missing"):
                loaderkit.restore(tmp_path / f"{rank}")

    @pytest.mark.parametrize("stage", [1, 3])
    def test_files_of_different_saves(self, stage: int, tmp_path: Path) -> None:
        made(tmp_path / "a", stage, 2)
        path = tmp_path / "a" / OPTIMIZER.format(1)
        with deepspeed_classes():
            saved = torch.load(path, weights_only=False)
            optimizer = saved["optimizer_state_dict"]
            base = optimizer["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
            base["param_groups"][0]["lr"] = 0.7
            torch.save(saved, path)
        with pytest.raises(FormatError, match=r"of rank 1 has another param_groups\.0\.lr .* different saves"):
            loaderkit.restore(tmp_path / "a")

    def test_ranks_of_an_older_save_are_left(self, tmp_path: Path) -> None:
        made(tmp_path / "a", 2, 4)
        made(tmp_path / "b", 2, 2)
        for rank in (2, 3):
            shutil.copy(tmp_path / "a" / OPTIMIZER.format(rank), tmp_path / "b")
        with pytest.raises(FormatError, match="saved by 2 ranks, and there are the files of 4"):
            loaderkit.restore(tmp_path / "b")

    def test_names_of_parameters_are_missing(self, tmp_path: Path) -> None:
        made(tmp_path / "a", 2, 2)
        (tmp_path / "a" / "mp_rank_00_model_states.pt").unlink()
        with pytest.raises(CheckpointError, match="with the names of the parameters is missing"):
            loaderkit.restore(tmp_path / "a")

    @pytest.mark.parametrize("name", ["mp_rank_01_model_states.pt", "layer_3_expert_1_mp_rank_00_model_states.pt"])
    def test_other_parallelism(self, name: str, tmp_path: Path) -> None:
        made(tmp_path / "a", 2, 2)
        shutil.copy(tmp_path / "a" / "mp_rank_00_model_states.pt", tmp_path / "a" / name)
        with pytest.raises(CheckpointError, match="name one file"):
            loaderkit.restore(tmp_path / "a")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("param_shapes", None),
            ("param_shapes", [{"group0.0.w": [10**9, 10**9]}]),
            ("param_shapes", [{"group0.0.w": "wide"}]),
            ("param_shapes", []),
            ("module", None),
            ("module", [1]),
            ("shared_params", 3),
        ],
    )
    def test_descriptions_that_no_writer_writes(self, key: str, value: Any, tmp_path: Path) -> None:
        for stage in (2, 3):
            made(tmp_path / f"{stage}", stage, 2, more={key: value})
            with pytest.raises(FormatError, match="of DeepSpeed"):
                loaderkit.restore(tmp_path / f"{stage}")


def test_what_no_writer_writes_is_an_error_of_ours(tmp_path: Path) -> None:
    rng = random.Random(0)
    junk: Any = (
        None,
        3,
        -1,
        "x",
        [],
        {},
        [1, "a"],
        {"x": 1},
        (2, 2),
        torch.ones(2),
        torch.ones(2, 2),
        10**30,
        1.5,
        {3: {}},
    )

    def spoiled(value: Any, depth: int) -> Any:
        if depth == 0 or not isinstance(value, (dict, list)) or not value:
            return rng.choice(junk)
        if isinstance(value, dict):
            key = rng.choice([*value])
            return {**value, key: spoiled(value[key], depth - 1)}
        number = rng.randrange(len(value))
        return [spoiled(item, depth - 1) if n == number else item for n, item in enumerate(value)]

    num_refused = 0
    for seed in range(120):
        folder = tmp_path / f"{seed}"
        made(folder, 1 + seed % 3, 2, seed % 5)
        path = rng.choice(sorted(folder.iterdir()))
        with deepspeed_classes():
            torch.save(spoiled(torch.load(path, weights_only=False), rng.randrange(1, 6)), path)
        try:
            loaderkit.restore(folder)
        except (CheckpointError, FormatError):
            num_refused += 1
    assert num_refused > 30


def test_nothing_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    expected = made(tmp_path / "a", 3, 2, more={"client": Evil(os.system, f"touch {mark}")})
    with pytest.raises(CheckpointError, match=r"'client' holds an object of \w+\.system"):
        loaderkit.restore(tmp_path / "a")
    assert_equal(loaderkit.restore(tmp_path / "a", keys=["module.*", "optimizer.*", "global_steps"]), expected)
    assert not mark.exists()
