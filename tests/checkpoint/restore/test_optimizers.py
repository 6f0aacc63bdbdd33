"""Optimizers in a checkpoint: by names as torch's `get_state_dict` gives them, in their own types, and compared beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import same, save_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit.checkpoint import latest
from loaderkit.checkpoint.restore.stateful import restore_state
from loaderkit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
Groups = Callable[[Any], Any]


def made() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False))


def trained(
    groups: Groups = lambda model: model.parameters(), kind: Any = torch.optim.AdamW, **options: Any
) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    model = made()
    optimizer = kind(groups(model), lr=0.1, **options)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.arange(12.0).reshape(4, 3).sin()).square().sum()
    loss.backward()
    optimizer.step()
    return float(loss)


def saved(folder: Path, state: dict[str, Any], **settings: Any) -> str:
    with loaderkit.CheckpointManager(folder, **settings) as checkpoints:
        checkpoints.save(1, state)
    return str(latest(folder))


def restored(folder: Path, state: dict[str, Any]) -> None:
    with loaderkit.CheckpointManager(folder) as checkpoints:
        checkpoints.restore(state)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return all(map(equal, one, other)) if isinstance(one, list) else same(one, other)


def shuffled(rng: random.Random) -> Groups:
    """The parameters in another order, in groups of another size."""
    order, cut = rng.sample(range(5), 5), rng.randrange(1, 5)

    def groups(model: torch.nn.Module) -> Any:
        params = [*model.parameters()]
        return [{"params": [params[n] for n in order[:cut]]}, {"params": [params[n] for n in order[cut:]], "lr": 0.02}]

    return groups


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("settings", [{}, {"optimizer_keys": "numbers"}, {"format": "safetensors"}])
def test_training_goes_on(kind: Any, settings: dict[str, Any], rng: random.Random, tmp_path: Path) -> None:
    """By names and by numbers, from the manager's own restore and from a nested state."""
    groups = shuffled(rng)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model, optimizer = trained(groups, kind, **options)
    url = saved(tmp_path, {"model": model, "optimizer": optimizer}, **settings)
    is_named = any(name.startswith("optimizer.state.0.weight.") for name in loaderkit.restore(url))
    assert is_named == (not settings)
    others = [made(), made()]
    optimizers = [kind(groups(other), lr=0.1, **options) for other in others]
    restored(tmp_path, {"model": others[0], "optimizer": optimizers[0]})
    state = loaderkit.restore(url, nested=True)
    others[1].load_state_dict(state["model"])
    optimizers[1].load_state_dict(state["optimizer"])
    for other in optimizers:
        assert equal(other.state_dict(), optimizer.state_dict())
    losses = step(model, optimizer)
    assert [step(*pair) for pair in zip(others, optimizers, strict=True)] == [losses, losses]


def test_names_are_those_of_get_state_dict(tmp_path: Path) -> None:
    """So torch reads what was saved, and what torch has saved is read, also where the order of parameters is another."""
    model, optimizer = trained(lambda model: [*model.parameters()][::-1], torch.optim.Adam)
    url = saved(tmp_path / "ours", {"model": model, "optimizer": optimizer})
    other = made()
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    tables: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
    load(tables, checkpoint_id=url, no_dist=True)
    set_state_dict(other, fresh, model_state_dict=tables["model"], optim_state_dict=tables["optimizer"])
    named: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    found: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(other, fresh), strict=True))
    assert equal(found["optimizer"]["state"], named["optimizer"]["state"])
    assert equal(dict(found["model"]), dict(named["model"]))

    save_dcp(named, tmp_path / "torch")
    third = made()
    optimizers = [torch.optim.Adam(third.parameters(), lr=0.1)]
    restore_state(str(tmp_path / "torch"), {"model": third, "optimizer": optimizers[0]}, timeout_s=60.0)
    assert equal(get_state_dict(third, optimizers)[1]["state"], named["optimizer"]["state"])


def test_in_place_by_numbers_of_what_was_saved_by_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    url = saved(tmp_path, {"model": model, "optimizer": optimizer})
    expected = optimizer.state_dict()
    other, fresh = trained()
    into = {"optimizer": fresh.state_dict(), "model": other.state_dict()}
    loaderkit.restore(url, into, strict=False)
    assert equal(into["optimizer"], expected)


class Wide(torch.optim.Optimizer):
    """Keeps float32 beside parameters of bfloat16."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros(param.shape))
                average += torch.rand(param.shape) / 3
                self.state[param]["more"] = {"low": torch.rand(3, dtype=torch.float64)}


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_state_keeps_its_types(is_stepped: bool, tmp_path: Path) -> None:
    model = made().to(torch.bfloat16)
    optimizer = Wide(model.parameters())
    optimizer.step()
    saved(tmp_path, {"model": model, "optimizer": optimizer})
    other = made().to(torch.bfloat16)
    fresh = Wide(other.parameters())
    if is_stepped:
        fresh.step()
    restored(tmp_path, {"model": other, "optimizer": fresh})
    assert fresh.state_dict()["state"][0]["average"].dtype == torch.float32
    assert equal(fresh.state_dict(), optimizer.state_dict())


DIFFERENT: dict[str, tuple[Groups, str]] = {
    "frozen": (
        lambda model: model[2].parameters(),
        r"other parameters than in the checkpoint: only in .*0\.bias|parameters, and 5",
    ),
    "two groups": (
        lambda model: [{"params": model[:2].parameters()}, {"params": model[2].parameters()}],
        "has 2 parameter groups, and 1 in the checkpoint",
    ),
    "other shapes": (
        lambda model: [torch.nn.Parameter(torch.zeros(k)) for k in (5, 3, 3, 3, 7)],
        r"has shape \[5\], and had \[3, 3\]|has shape \[3, 3\], and its parameter here \[5\]",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("keys", ["names", "numbers"])
def test_other_groups_are_refused_before_anything_is_written(case: str, keys: str, tmp_path: Path) -> None:
    groups, said = DIFFERENT[case]
    model, optimizer = trained()
    saved(tmp_path, {"model": model, "optimizer": optimizer}, optimizer_keys=keys)
    other = made()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    fresh = torch.optim.AdamW(groups(other), lr=0.5)
    with pytest.raises(CheckpointError, match=said):
        restored(tmp_path, {"model": other, "optimizer": fresh})
    assert equal(dict(other.state_dict()), before)
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.5


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved(tmp_path, {"model": model, "optimizer": optimizer})
    with pytest.raises(
        CheckpointError, match=r"has dampening, momentum, and in the checkpoint .*betas.* of another kind than SGD"
    ):
        restored(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)})


def test_names_that_are_asked_for_and_not_there(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    saved(tmp_path / "a", {"optimizer": optimizer})  # by numbers
    with pytest.raises(ConfigError, match="'optimizer' has parameters that are not all those of one module"):
        saved(tmp_path / "b", {"optimizer": optimizer, "model": made()}, optimizer_keys="names")
