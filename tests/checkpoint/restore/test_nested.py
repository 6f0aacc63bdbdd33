"""`restore(nested=True)` gives the state as it was saved, by every writer that tells what its containers are."""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import same, save_dcp

import loaderkit
from loaderkit.checkpoint import latest
from loaderkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")


def by_manager(kind: str) -> Callable[[Any, Path], str]:
    def save(state: Any, folder: Path) -> str:
        with loaderkit.CheckpointManager(folder, format=kind) as checkpoints:
            checkpoints.save(1, state)
        return str(latest(folder))

    return save


def by_torch(state: Any, folder: Path) -> str:
    torch.save(state, folder / "state.pt")
    return str(folder / "state.pt")


WRITERS = {"dcp": by_manager("dcp"), "safetensors": by_manager("safetensors"), "torch": by_torch}


def alike(one: Any, other: Any) -> bool:
    """Equal to the last bit, and of the same types all the way down; the order of keys is not kept, where a table is empty."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return same(one, other)


def drawn(rng: random.Random, depth: int = 0) -> Any:
    """A value of a state: any container, empty ones included, with any in it."""
    kind = rng.choice(
        ["tensor", "plain", "dict", "numbered", "list", "tuple", "ordered", "counter"][: 8 if depth < 3 else 2]
    )
    size = rng.randrange(4)
    items = (
        [drawn(rng, depth + 1) for _ in range(size)] if kind in ("dict", "numbered", "list", "tuple", "ordered") else []
    )
    plain = rng.choice([None, True, 3, 2**100, 0.5, "x", b"y", (1, "z"), [], [1, 2], ()])
    made: dict[str, Callable[[], Any]] = {
        "tensor": lambda: torch.tensor([rng.random() for _ in range(size)]),
        "plain": lambda: plain,
        "dict": lambda: dict(zip(rng.sample(["a", "0", "1", "b.c", "-", "7"], size), items, strict=True)),
        "ordered": lambda: OrderedDict(zip(rng.sample(["z", "0", "1", "b.c"], size), items, strict=True)),
        "numbered": lambda: dict(zip(rng.sample([0, 1, -3, 12], size), items, strict=True)),
        "counter": lambda: Counter(rng.choices([2, 5, 9], k=size)),
        "tuple": lambda: tuple(item for item in items if not isinstance(item, dict)),
        "list": lambda: items,
    }
    return made[kind]()


@pytest.mark.parametrize("writer", WRITERS)
def test_what_was_saved_comes_back(writer: str, rng: random.Random, tmp_path: Path) -> None:
    state = {f"part-{number}": drawn(rng) for number in range(25)} | {"w": torch.ones(2)}
    restored = loaderkit.restore(WRITERS[writer](state, tmp_path), nested=True)
    restored.pop("loaderkit", None)
    assert sorted(restored) == sorted(state)
    for name in state:
        assert alike(restored[name], state[name]), (name, state[name])


class Versioned(torch.nn.Module):
    """Reads states of before version 2 in other units."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("is_old", [False, True])
def test_versions_of_modules(writer: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.load gives them: what an older class has saved is converted, and nothing else."""
    saved: Any = torch.nn.Sequential(Versioned())
    with monkeypatch.context() as patch:
        patch.setattr(Versioned, "_version", 1 if is_old else 2)
        url = WRITERS[writer]({"model": saved.state_dict()}, tmp_path)
    expected = saved[0].weight * (10 if is_old else 1)
    model: Any = torch.nn.Sequential(Versioned())
    model.load_state_dict(loaderkit.restore(url, nested=True, keys="model*")["model"])
    assert torch.equal(model[0].weight, expected)
    if writer != "torch":
        model = torch.nn.Sequential(Versioned())
        loaderkit.CheckpointManager(tmp_path).restore({"model": model})
        assert torch.equal(model[0].weight, expected)
    model = torch.nn.Sequential(Versioned())
    before = model[0].weight.clone()
    if is_old:  # in place nothing would convert it
        with pytest.raises(CheckpointError, match=r"module 'model\.0' is of version 2, and 1 in the checkpoint"):
            loaderkit.restore(url, {"model": model.state_dict()}, strict=False)
        assert torch.equal(model[0].weight, before)
    else:
        loaderkit.restore(url, {"model": model.state_dict()}, strict=False)
        assert torch.equal(model[0].weight, expected)


def test_versions_of_a_file_that_is_a_module_s_state(tmp_path: Path) -> None:
    saved, model = Versioned(), Versioned()
    torch.save(saved.state_dict(), tmp_path / "m.pt")
    model.load_state_dict(loaderkit.restore(tmp_path / "m.pt"))
    assert torch.equal(model.weight, saved.weight)


def test_items_stay_at_their_places(tmp_path: Path) -> None:
    torch.save({"parts": [torch.zeros(1), torch.ones(1), {"a": torch.ones(2)}]}, tmp_path / "m.pt")
    first, second, third = loaderkit.restore(tmp_path / "m.pt", keys="parts.2*", nested=True)["parts"]
    assert first is second is None
    assert third["a"].tolist() == [1, 1]


def test_an_optimizer_and_a_table_of_numbers_that_torch_has_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch.distributed.checkpoint makes text of keys: an optimizer's numbers are known, and of others a warning says it."""
    caplog.set_level(logging.WARNING, "loaderkit")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_dcp({"optimizer": optimizer.state_dict(), "w": torch.ones(1)}, tmp_path / "a")
    restored = loaderkit.restore(tmp_path / "a", nested=True)["optimizer"]
    assert [*restored["state"]] == [0, 1]
    assert not caplog.records
    save_dcp({"milestones": {3: 1, 7: 2}}, tmp_path / "b")
    assert loaderkit.restore(tmp_path / "b", nested=True) == {"milestones": {"3": 1, "7": 2}}
    assert "the keys of 'milestones' are digits" in caplog.text


@pytest.mark.parametrize("extra", [{"scale": 7.0}, 3, torch.ones(2)])
def test_in_place_what_only_a_module_can_take_is_refused(extra: Any, tmp_path: Path) -> None:
    class Extra(torch.nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    saved, model = Extra(2, 2), Extra(2, 2)
    saved.extra = extra
    model.extra = torch.zeros(2) if isinstance(extra, torch.Tensor) else extra
    torch.save({"model": saved.state_dict()}, tmp_path / "m.pt")
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"'model\._extra_state.*gets it by `set_extra_state` only"):
        loaderkit.restore(tmp_path / "m.pt", {"model": model.state_dict()})
    assert torch.equal(model.weight, before)
    state = {name: value for name, value in model.state_dict().items() if name != "_extra_state"}
    loaderkit.restore(tmp_path / "m.pt", {"model": state}, strict=False)
    assert torch.equal(model.weight, saved.weight)
