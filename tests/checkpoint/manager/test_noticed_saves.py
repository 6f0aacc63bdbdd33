"""What a manager saves upon a notice with little time, and that the next start finds it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiered import Two, steps_in

import loaderkit
from loaderkit.checkpoint import latest
from loaderkit.errors import CheckpointError

LONG, SHORT = "1h", "1ms"  # of which the second is over before anything could be saved
SIGNAL = signal.SIGUSR1


def made(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "position": 0}


def train(state: dict[str, Any], step: int) -> None:
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    state["optimizer"].zero_grad()
    state["model"](data).square().mean().backward()
    state["optimizer"].step()
    state["position"] = step


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Weights and moments now."""
    moments = [one["exp_avg"].clone() for one in state["optimizer"].state.values()]
    return {"weights": [param.detach().clone() for param in state["model"].parameters()], "moments": moments}


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def run(folder: Any, within: str, steps: range, **settings: Any) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Train from what is restored; a notice comes in the last step. The stats of the last save, and all states by step."""
    state, known = made(), {}
    notice = {"signals": ["SIGUSR1"], "within": within}
    with loaderkit.CheckpointManager(folder, notice=notice, **settings) as checkpoints:
        first = checkpoints.restore(state) or 0
        assert first == steps.start - 1
        known[first] = copied(state)
        for step in steps:
            train(state, step)
            known[step] = copied(state)
            if step == steps[-1]:
                checkpoints.wait_until_finished()
                os.kill(os.getpid(), SIGNAL)
            checkpoints.save(step, state)
            assert checkpoints.reached_preemption(step) == (step == steps[-1])
    return checkpoints.stats(), known


class TestWithoutOptimizers:
    def test_weights_and_position_go_on_with_the_optimizer_of_before(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        keep = {"last": 1}
        stats, known = run(tmp_path, SHORT, range(1, 4), keep=keep)
        assert stats["last"]["extent"]["whole"] is False
        assert stats["last"]["extent"]["place"] == "to"
        assert "the state without that of optimizers to `to`, which takes " in caplog.text
        assert steps_of(tmp_path) == [2, 3]  # what the optimizer comes from stays

        state = made(1)
        with loaderkit.CheckpointManager(tmp_path, keep=keep) as checkpoints:
            assert checkpoints.restore(state) == state["position"] == 3
            now = copied(state)
            assert same(now["weights"], known[3]["weights"])
            assert same(now["moments"], known[2]["moments"])
            assert "step-0000000003 was saved upon a notice without the state of optimizers, which are restored" in (
                caplog.text
            )
            train(state, 4)
            checkpoints.save(4, state)
        assert steps_of(tmp_path) == [4]
        assert loaderkit.restore(latest(tmp_path))["position"] == 4

    def test_another_notice_before_the_next_save(self, tmp_path: Path) -> None:
        keep = {"last": 1}
        _, known = run(tmp_path, SHORT, range(1, 4), keep=keep)
        stats, more = run(tmp_path, SHORT, range(4, 5), keep=keep)
        assert stats["last"]["extent"]["whole"] is False
        assert steps_of(tmp_path) == [2, 3, 4]
        state = made(1)
        with loaderkit.CheckpointManager(tmp_path, keep=keep) as checkpoints:
            assert checkpoints.restore(state) == 4
        assert same(copied(state)["weights"], more[4]["weights"])
        assert same(copied(state)["moments"], known[2]["moments"])

    def test_both_are_uploaded_by_the_next_start(self, tmp_path: Path) -> None:
        """Before it has restored anything: until the next upload the machine may be lost with `local`."""
        far, keep = tmp_path / "far", {"last": 1}
        _, known = run(far, SHORT, range(1, 4), keep=keep, local=str(tmp_path / "near"))
        shutil.rmtree(far)
        with loaderkit.CheckpointManager(far, keep=keep, local=str(tmp_path / "near")) as checkpoints:
            checkpoints.wait_until_finished()
        assert steps_of(far) == [2, 3]
        state = made(1)
        with loaderkit.CheckpointManager(far, keep=keep) as checkpoints:
            assert checkpoints.restore(state) == 3
        assert same(copied(state)["moments"], known[2]["moments"])

    def test_none_was_saved_before(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        run(tmp_path, SHORT, range(1, 3))
        remove(tmp_path / "step-0000000001")
        state = made(1)
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            assert checkpoints.restore(state) == 2
        assert not state["optimizer"].state
        assert "which begin anew: there is no checkpoint before it" in caplog.text

    def test_if_that_of_the_optimizer_is_damaged_the_one_before_both_is_taken(self, tmp_path: Path) -> None:
        _, known = run(tmp_path, SHORT, range(1, 4))
        (file,) = (tmp_path / "step-0000000002").glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 255
        file.write_bytes(data)
        state = made(1)
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            assert checkpoints.restore(state) == 1
        assert same(copied(state)["moments"], known[1]["moments"])

    @pytest.mark.parametrize("format", ["dcp", "safetensors"])
    @pytest.mark.parametrize("kind", ["steps", "one cycle"])
    def test_options_that_a_scheduler_has_changed_are_those_of_the_save(
        self,
        kind: str,
        format: str,  # noqa: A002
        tmp_path: Path,
    ) -> None:
        """StepLR multiplies the rate that it finds: one of before its milestone would stay too large for ever."""

        def scheduled(seed: int = 0, name: str = "optimizer") -> dict[str, Any]:
            state = made(seed)
            optimizer = state.pop("optimizer")
            scheduler: Any = (
                torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
                if kind == "steps"
                else torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
            )
            return state | {name: optimizer, "scheduler": scheduler, "seen": {}, "bank": []}

        def options(optimizer: Any) -> list[dict[str, Any]]:
            return [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]

        state, expected = scheduled(), []
        notice = {"signals": ["SIGUSR1"], "within": SHORT}
        with loaderkit.CheckpointManager(tmp_path, notice=notice, format=format) as checkpoints:
            for step in range(1, 5):
                train(state, step)
                state["scheduler"].step()
                state["seen"] = {f"in {step}": step}  # of which a checkpoint of before has others
                state["bank"].append(torch.full((2,), float(step)))
                if step == 4:
                    checkpoints.wait_until_finished()
                    os.kill(os.getpid(), SIGNAL)
                if step in (2, 4):
                    checkpoints.save(step, state)
        for step in (4, 5):
            expected.append(options(state["optimizer"]))
            train(state, step)
            state["scheduler"].step()

        names = ["optimizer", "other"] if format == "dcp" else ["optimizer"]
        for name in names:
            rename = None if name == "optimizer" else {"optimizer.": f"{name}."}
            again, found = scheduled(1, name), []
            with loaderkit.CheckpointManager(tmp_path, format=format) as checkpoints:
                assert checkpoints.restore(again, rename=rename) == 4
            assert again["seen"] == {"in 4": 4}
            assert [int(one[0]) for one in again["bank"]] == [1, 2, 3, 4]
            again["optimizer"] = again[name]
            for step in (4, 5):
                found.append(options(again[name]))
                train(again, step)
                again["scheduler"].step()
            assert found == expected

    def test_a_table_of_an_optimizer_gets_the_options_of_the_save(self, tmp_path: Path) -> None:
        state = made()
        notice = {"signals": ["SIGUSR1"], "within": SHORT}
        with loaderkit.CheckpointManager(tmp_path, notice=notice) as checkpoints:
            for step in (1, 2):
                train(state, step)
                state["optimizer"].param_groups[0] |= {"lr": 0.5 / step, "betas": (0.8, 0.9 + step / 100)}
                if step == 2:
                    checkpoints.wait_until_finished()
                    os.kill(os.getpid(), SIGNAL)
                checkpoints.save(step, {"a": {"optim": state["optimizer"].state_dict()}, "model": state["model"]})
        other = made(1)
        train(other, 1)
        table = {"a": {"optim": other["optimizer"].state_dict()}, "model": other["model"]}
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            assert checkpoints.restore(table) == 2
        group = table["a"]["optim"]["param_groups"][0]
        assert (group["lr"], group["betas"]) == (0.25, (0.8, 0.92))

    @pytest.mark.parametrize("format", ["dcp", "safetensors"])
    def test_tables_of_optimizers_are_left_out_too(self, format: str, tmp_path: Path) -> None:  # noqa: A002
        state = made()
        notice = {"signals": ["SIGUSR1"], "within": SHORT}
        with loaderkit.CheckpointManager(tmp_path, notice=notice, format=format) as checkpoints:
            for step in (1, 2):
                train(state, step)
                table = {"a": {"optim": state["optimizer"].state_dict(), "lr": 0.5}, "model": state["model"]}
                if step == 2:
                    checkpoints.wait_until_finished()
                    os.kill(os.getpid(), SIGNAL)
                checkpoints.save(step, table)
        names = loaderkit.restore(latest(tmp_path)).keys()
        assert "a.lr" in names
        assert not [name for name in names if name.startswith("a.optim")]
        with pytest.raises(CheckpointError, match="missing in the checkpoint"):
            loaderkit.restore(latest(tmp_path), into=made()["optimizer"].state_dict())

    def test_what_takes_its_state_as_one_thing_is_not_cut(self, tmp_path: Path) -> None:
        """Such as an object of the user's with the state of a model and an optimizer; the whole is then saved."""
        state = made()

        class Application:
            def state_dict(self) -> dict[str, Any]:
                return {"model": state["model"].state_dict(), "optim": state["optimizer"].state_dict()}

            def load_state_dict(self, saved: dict[str, Any]) -> None:
                state["optimizer"].load_state_dict(saved["optim"])

        notice = {"signals": ["SIGUSR1"], "within": SHORT}
        with loaderkit.CheckpointManager(tmp_path, notice=notice) as checkpoints:
            for step in (1, 2):
                train(state, step)
                if step == 2:
                    os.kill(os.getpid(), SIGNAL)
                checkpoints.save(step, {"app": Application()})
            assert checkpoints.restore({"app": Application()}) == 2
            assert checkpoints.stats()["last"]["extent"]["whole"] is True


class TestWhole:
    def test_all_is_saved_where_there_is_time(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            stats, known = run(tmp_path / "to", LONG, range(1, 4), local=tmp_path / "near")
        assert stats["last"]["extent"]["whole"] is True
        assert stats["last"]["extent"]["place"] == "to"
        assert stats["last"]["extent"]["seconds"] < 60
        assert 3 in steps_of(tmp_path / "to")
        assert (
            "after step 3 (SIGUSR1) 3.24e+03 s are left to save: the whole state to `to`, which takes " in caplog.text
        )
        state = made(1)
        with loaderkit.CheckpointManager(tmp_path / "to") as checkpoints:
            assert checkpoints.restore(state) == 3
        assert same(copied(state)["moments"], known[3]["moments"])

    def test_what_was_never_uploaded_is_left_to_the_next_run(self) -> None:
        """Of an upload nothing is known, so it is not waited for."""
        two = Two()
        two.far.hold()
        notice = {"signals": ["SIGUSR1"], "within": LONG}
        with two.manager(notice=notice) as checkpoints:
            checkpoints.save(1, {"x": torch.ones(3)}, wait=True)
            os.kill(os.getpid(), SIGNAL)
            checkpoints.save(2, {"x": torch.ones(3)})
            two.far.gate.set()
        extent = checkpoints.stats()["last"]["extent"]
        assert (extent["whole"], extent["place"]) == (True, "local")
        assert 2 in steps_in(two.near)
        assert 2 not in steps_in(two.far)
        with two.manager() as checkpoints:
            checkpoints.wait_until_finished()
        assert 2 in steps_in(two.far)

    def test_exports_and_retention_are_left_to_the_next_save(self, tmp_path: Path) -> None:
        copies = [{"to": tmp_path / "export", "dtype": "bfloat16"}]
        stats, _ = run(tmp_path / "to", LONG, range(1, 4), keep={"last": 1}, copies=[*copies])
        assert "copies" not in stats["last"]
        assert steps_of(tmp_path / "to") == [2, 3]
        assert steps_of(tmp_path / "export") == [1, 2]


class TestAuto:
    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The manager's clock, in seconds."""
        now = [0.0]
        monkeypatch.setattr("loaderkit.checkpoint.manager.manager.monotonic", lambda: now[0])
        return now

    def test_the_first_save_measures(self, tmp_path: Path, now: list[float]) -> None:
        saved = []
        with loaderkit.CheckpointManager(tmp_path, every="auto", mtbf="1h") as checkpoints:
            for step in range(1, 121):
                now[0] += 1.0
                if checkpoints.save(step, {"x": torch.ones(4)}, wait=True) is not None:
                    saved.append(step)
        assert saved[0] == 60
        assert len(saved) > 1  # one costs next to nothing here

    def test_restarts_are_counted(self, tmp_path: Path, now: list[float]) -> None:
        found = []
        for number in range(4):
            with loaderkit.CheckpointManager(tmp_path, every="auto") as checkpoints:
                checkpoints.restore({"x": torch.ones(4)})
                found.append(round(checkpoints._pace.mtbf_s / 86400, 2))
                now[0] += 1e6
                checkpoints.save(number, {"x": torch.ones(4)}, force=number == 2)  # after which a job may have ended
        assert found == [1.0, 0.5, 0.33, 0.33]


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
