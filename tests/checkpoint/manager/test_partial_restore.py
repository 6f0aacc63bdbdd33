"""`CheckpointManager.restore(strict=..., rename=...)` and `StreamReader(rename=...)`: as `loaderkit.restore` has them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import save_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit import CheckpointManager
from loaderkit.checkpoint import StreamReader
from loaderkit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def network(*names: str, head: int = 3, seed: int = 0) -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({name: torch.nn.Linear(4, head if name == "head" else 5) for name in names})


def weight_of(model: torch.nn.ModuleDict, name: str = "body") -> torch.Tensor:
    layer = model[name]
    assert isinstance(layer, torch.nn.Linear)
    return layer.weight


def saved(folder: Path, state: dict[str, Any], *, name: str = "runs") -> Path:
    with CheckpointManager(folder / name, every=1) as manager:
        manager.save(1, state)
    return folder / name


def restore(folder: Path, state: dict[str, Any], **more: Any) -> int | None:
    with CheckpointManager(folder, every=1) as manager:
        return manager.restore(state, **more)


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_the_same_as_restore(tmp_path: Path, rng: random.Random) -> None:
    """Of drawn modules, with parts that only one has, a head of another shape, and other names."""
    for number in range(12):
        names = [f"part{n}" for n in range(5)]
        there, here = ([*rng.sample(names, rng.randint(2, 5)), "head"] for _ in range(2))
        if not {*there} & {*here} - {"head"}:
            continue
        model = network(*there, head=rng.choice([3, 4]))
        begin = rng.choice(["model", "net", "inner.model"])
        state: dict[str, Any] = {"inner": {"model": model}} if "." in begin else {begin: model}
        folder = saved(tmp_path, {**state, "epoch": 7, "extra": torch.ones(2)}, name=f"{number}")
        strict = {"missing": ["model.head.*", "model.part*"], "unexpected": ["model.part*", "extra", "epoch"]}
        rename = {f"{begin}.": "model."} if begin != "model" else None
        found, wanted = network(*here, seed=1), network(*here, seed=1)
        assert restore(folder, {"model": found}, strict=strict, rename=rename) == 1
        into = {"model": wanted.state_dict()}
        also = {**strict, "unexpected": [*strict["unexpected"], "loaderkit.*"]}  # what the manager adds
        loaderkit.restore(next(folder.glob("step-*")), into=into, strict=also, rename=rename)
        for name, tensor in wanted.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), name
        for name in (name for name in here if name in there and name != "head"):
            assert torch.equal(weight_of(found, name), weight_of(model, name))


def test_what_is_new_keeps_its_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = network("body", "head")
    optimizer = torch.optim.AdamW(model.parameters())
    folder = saved(tmp_path, {"model": model, "epoch": 3, "average": torch.ones(2)})
    tuned = network("body", "head", "more", head=9, seed=1)
    other = torch.optim.AdamW(tuned.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 3)
    before = values(tuned)
    state: dict[str, Any] = {
        "model": tuned,
        "optimizer": other,
        "scheduler": scheduler,
        "epoch": 0,
        "average": torch.zeros(5),
        "seen": 8,
    }
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint(?s:.*)strict={'missing': GLOBS}"):
        restore(folder, state)
    strict = {"missing": ["model.head.*", "model.more.*", "optimizer.*", "scheduler", "seen", "average"]}
    assert restore(folder, state, strict=strict) == 1
    assert torch.equal(weight_of(tuned), weight_of(model))
    for name, tensor in tuned.state_dict().items():
        assert name.startswith("body.") or torch.equal(tensor, before[name])
    assert (state["epoch"], state["seen"], state["average"].tolist()) == (3, 8, [0] * 5)
    assert other.param_groups[0]["lr"] == 0.5
    for name in ("model.head.weight", "average"):
        assert f"{name} has another shape there" in caplog.text
    del optimizer


def test_what_only_the_checkpoint_has(tmp_path: Path) -> None:
    model = network("body", "head")
    folder = saved(tmp_path, {"model": model, "table": {"a": 1, "b": torch.ones(2)}, "list": [1, 2]})
    for strict in (False, {"unexpected": ["model.head.*", "table.b"]}):
        smaller = network("body", seed=1)
        state = {"model": smaller, "table": {"a": 0}, "list": [0, 0]}
        with pytest.raises(CheckpointError, match="only in the checkpoint"):
            restore(folder, state)
        assert restore(folder, state, strict=strict) == 1
        assert torch.equal(weight_of(smaller), weight_of(model))
        assert state == {"model": smaller, "table": {"a": 1}, "list": [1, 2]}


def test_an_optimizer_by_names_is_renamed(tmp_path: Path) -> None:
    model = network("body")
    optimizer = torch.optim.AdamW(model.parameters())
    model["body"](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    folder = saved(tmp_path, {"net": model, "adam": optimizer})
    other = network("body", seed=1)
    adam = torch.optim.AdamW(other.parameters())
    restore(folder, {"model": other, "optimizer": adam}, rename={"net.": "model.", "adam.": "optimizer."})
    assert torch.equal(weight_of(other), weight_of(model))
    found, wanted = adam.state[weight_of(other)], optimizer.state[weight_of(model)]
    assert torch.equal(found["exp_avg"], wanted["exp_avg"])


def test_mistakes_are_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No older checkpoint is taken in the place of one that does not fit."""
    model = network("body")
    with CheckpointManager(tmp_path / "runs", every=1) as manager:
        for step in (1, 2):
            manager.save(step, {"model": model})
            manager.wait_until_finished()
        before = network("body", seed=1)
        kept = values(before)
        cases: list[tuple[dict[str, Any], str]] = [
            ({"rename": {"nothing.": ""}}, "no name that begins with 'nothing.'"),
            ({"rename": {"model.": "m."}, "strict": {"missing": "*"}}, "none of the names here"),
        ]
        for more, said in cases:
            with pytest.raises(CheckpointError, match=said):
                manager.restore({"model": before}, **more)
        mistakes: list[dict[str, Any]] = [{"strict": "model.*"}, {"strict": {"mising": "x"}}, {"rename": {"a*": "b**"}}]
        for more in mistakes:
            with pytest.raises(ConfigError):
                manager.restore({"model": before}, **more)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in before.state_dict().items())
    assert "passed over" not in caplog.text


@pytest.mark.parametrize("kind", ["module", "table", "optimizer"])
def test_what_a_damaged_one_has_filled_is_not_kept(kind: str, tmp_path: Path) -> None:
    """The one before lacks it, so that it would keep what the damaged one has left there."""

    def state_of(number: float, *, has_more: bool) -> dict[str, Any]:
        body, more = torch.full((200_000,), number), torch.nn.Linear(4, 4)
        if kind == "optimizer":
            optimizer = torch.optim.SGD(more.parameters(), lr=number, momentum=0.9)
            return {"body": body} | ({"more": optimizer} if has_more else {})
        return {"body": body} | ({"more": more if kind == "module" else {"x": torch.ones(3)}} if has_more else {})

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1.0, has_more=False))
        manager.save(2, state_of(2.0, has_more=True))
    (file,) = (tmp_path / "step-0000000002").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[400_000] ^= 1
    file.write_bytes(data)
    strict = {"missing": "more*"}
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=r"step-0000000001 is restored, and has no more"):
            manager.restore(state_of(0.0, has_more=True), strict=strict)
        # What only the damaged one has, and nothing here keeps, is no loss.
        alone = state_of(0.0, has_more=False)
        assert manager.restore(alone, strict=strict) == 1
        assert alone["body"].tolist() == [1.0] * 200_000
    shutil.rmtree(tmp_path / "step-0000000002")
    fresh = state_of(0.0, has_more=True)
    assert restore(tmp_path, fresh, strict=strict) == 1
    assert fresh["body"].tolist() == [1.0] * 200_000


def test_stream_reader_renames(tmp_path: Path) -> None:
    given: dict[str, Any] = {"module.w": torch.arange(6.0).reshape(2, 3), "module.n": 5}
    save_dcp(given, tmp_path / "s")
    state: dict[str, Any] = {"model.w": torch.zeros(2, 3), "model.n": 0}
    reader = StreamReader(tmp_path / "s", rename={"module.": "model."})
    for _ in range(2):
        state["model.w"].zero_()
        load(state, storage_reader=reader, no_dist=True)
        assert torch.equal(state["model.w"], given["module.w"])
        assert state["model.n"] == 5
    with pytest.raises((CheckpointError, CheckpointException), match="no name that begins with 'x'"):
        load(state, storage_reader=StreamReader(tmp_path / "s", rename={"x": "y"}), no_dist=True)
    with pytest.raises(ConfigError, match="rename"):
        StreamReader(tmp_path / "s", rename={"*": "**"})
