"""A training state comes back in place: modules, optimizers before and after their first step, schedulers, values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import HoldsTable, nested_of, same, save_dcp

import loaderkit
from loaderkit.checkpoint.restore.stateful import restore_state
from loaderkit.checkpoint.state import resolve
from loaderkit.checkpoint.structure import OWN_KEY, saved_structure
from loaderkit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
Optimizers = Callable[[Any], torch.optim.Optimizer]


class Loop:
    """A little training; how many steps it has done decides everything in it."""

    def __init__(self, make: Optimizers, num_steps: int = 0) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False)
        )
        self.optimizer = make(
            [{"params": [*self.model[0].parameters()]}, {"params": [*self.model[1:].parameters()], "lr": 0.01}]
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self.values: dict[str, Any] = {
            "best": None,
            "history": [],
            "moves": {3: "a", 7: "b"},
            "average": torch.zeros(3),
        }
        for number in range(num_steps):
            self.step(number)

    def step(self, number: int) -> float:
        data = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        loss = self.model(data).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        found: float = loss.item()
        self.values["best"] = found
        self.values["history"] = [*self.values["history"], found]
        self.values["average"] += number
        return found

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, **self.values}


def resolved_state(state: Any) -> Any:
    return nested_of(resolve(state))


def saved_by_manager(state: Any) -> Any:
    resolved = resolve(state)
    return resolved_state(state) | {OWN_KEY: saved_structure(resolved.containers)}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return same(one, other)


MAKES: dict[str, Optimizers] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
}


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("num_before", [0, 4])
@pytest.mark.parametrize("num_saved", [0, 3])
def test_training_goes_on_to_the_last_bit(kind: str, num_before: int, num_saved: int, tmp_path: Path) -> None:
    """Into an optimizer that has taken no step yet, and into one that has; saved with and without a state of its own."""
    saved = Loop(MAKES[kind], num_saved)
    save_dcp(resolved_state(saved.state()), tmp_path / "step")
    loop = Loop(MAKES[kind], num_before)
    pointers = {name: tensor.data_ptr() for name, tensor in loop.model.state_dict().items()}
    state = loop.state()
    restore_state(str(tmp_path / "step"), state, timeout_s=60.0)
    loop.values = {name: state[name] for name in loop.values}
    assert equal(resolved_state(loop.state()), resolved_state(saved.state()))
    assert {name: tensor.data_ptr() for name, tensor in loop.model.state_dict().items()} == pointers
    for number in range(num_saved, num_saved + 4):
        assert loop.step(number) == saved.step(number)
    assert equal(resolved_state(loop.state()), resolved_state(saved.state()))


class Opaque:
    """An object whose state has containers of all kinds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    ("value", "fresh"),
    [
        ({0: torch.ones(2), 5: torch.zeros(1)}, {}),
        ([torch.ones(2), {"a": 3}, [torch.zeros(1)]], []),
        ({0: torch.ones(2), 1: torch.ones(1)}, {0: torch.zeros(2), 1: torch.zeros(1)}),
        ({"a": [1, 2, (3, "x")], "b": {1, 2}, "c": b"y", "d": 2.5, "e": None}, {}),
        ({}, {"a": 1}),
        (torch.arange(3), None),
        (Counter({7: 2}), Counter()),
    ],
)
def test_containers_of_an_object(value: Any, fresh: Any, tmp_path: Path) -> None:
    save_dcp(saved_by_manager({"it": Opaque(value), "n": 1}), tmp_path / "step")
    state = {"it": Opaque(fresh), "n": 0}
    restore_state(str(tmp_path / "step"), state, timeout_s=60.0)
    assert equal(state["it"].value, value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "fresh"),
    [
        ({"a": 1, "b": {"c": [1, 2], "d": None}}, {}),
        ({"a": 1, "b": {"c": [1, 2], "d": None}}, {"b": {"c": []}}),
        ({"ema": torch.ones(3), "parts": [torch.arange(4), {"n": 3}]}, {}),
        ({"ema": torch.ones(3)}, {"ema": torch.zeros(3)}),
        ([{"a": 1}, {"a": 2}], []),
        ({3: {"loss": 0.5}, 7: {"loss": 0.25}}, {}),
        ({3: 0.5, 7: 0.25}, {3: 0.0}),
        (Counter({"a": 2}), Counter()),
    ],
)
def test_a_table_gets_what_it_does_not_have_yet(value: Any, fresh: Any, tmp_path: Path) -> None:
    """Such as a history that grows while training goes on, and is empty when the job begins again."""
    save_dcp(saved_by_manager({"history": value, "n": 1}), tmp_path / "step")
    state = {"history": fresh, "n": 0}
    restore_state(str(tmp_path / "step"), state, timeout_s=60.0)
    assert state["history"] is fresh
    assert equal(state["history"], value)
    assert state["n"] == 1


@pytest.mark.parametrize(("saved", "fresh"), [([torch.ones(1)] * 2, [torch.zeros(1)]), ({"a": {"b": 1}}, {"a": (3,)})])
def test_a_table_that_has_no_place_for_it(saved: Any, fresh: Any, tmp_path: Path) -> None:
    save_dcp({"x": saved}, tmp_path / "step")
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: 'x\.(1|a\.b)'"):
        restore_state(str(tmp_path / "step"), {"x": fresh}, timeout_s=60.0)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.eye(2).to_sparse(), "torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), "on the meta device"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), r"torch\.bits8 tensor"),
        (torch.empty(2, dtype=torch.uint4), r"torch\.uint4 tensor"),  # type: ignore[attr-defined]
    ],
)
def test_tensors_that_could_not_be_restored_are_refused(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"'a\.x' is .*{said}"):
        resolve({"a": {"x": tensor}})


class TestWhatDoesNotFit:
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        save_dcp({"model": torch.nn.Linear(3, 2).state_dict(), "x": torch.ones(3), "n": 1}, tmp_path / "step")
        return str(tmp_path / "step")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"model": torch.nn.Linear(3, 3)}, r"'model\.weight' has shape \[3, 3\], and \[2, 3\] in the checkpoint"),
            ({"model": torch.nn.Linear(3, 2, dtype=torch.float64)}, "is torch.float64, and torch.float32"),
            ({"model": torch.nn.Linear(3, 2, bias=False)}, r"only in the checkpoint: model\.bias"),
            ({"model": torch.nn.Sequential(torch.nn.Linear(3, 2))}, r"missing in the checkpoint \(2\): model\.0\.bias"),
            ({"model": torch.nn.Linear(3, 2, device="meta")}, "has no memory"),
            ({"y": torch.ones(2)}, r"missing in the checkpoint \(1\): y"),
            ({"x": 3}, "'x' is a tensor in the checkpoint, and here a int"),
            ({"n": torch.ones(1)}, "'n' is a tensor, and none in the checkpoint"),
        ],
    )
    def test_nothing_is_written(self, url: str, change: dict[str, Any], said: str) -> None:
        x = torch.zeros(3)
        model = torch.nn.Linear(3, 2)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = {"first": model, "model": model, "x": x, "n": 0, **change}
        state.pop("first")
        with pytest.raises(CheckpointError, match=said) as caught:
            restore_state(url, state, timeout_s=60.0)
        assert "nothing was written" in str(caught.value)
        assert not x.any()
        assert equal(before, dict(model.state_dict()))

    @pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(3, dtype=torch.int64), 5])
    def test_what_does_not_fit_is_named_once(self, url: str, x: Any) -> None:
        """And not as if the state had nothing of that name."""
        with pytest.raises(CheckpointError) as caught:
            restore_state(url, {"x": x}, timeout_s=60.0)
        assert str(caught.value).count("'x'") == 1

    @pytest.mark.parametrize(
        ("saved", "here", "said"),
        [
            (
                "_orig_mod",
                "",
                r"'m.0.bias' is 'm._orig_mod.0.bias' in the checkpoint: it was saved wrapped by torch.compile",
            ),
            (
                "",
                "_orig_mod",
                r"wrapped by torch.compile, and where .* was not: put the module in it, model._orig_mod, into",
            ),
            (
                "module",
                "",
                r"saved wrapped by DistributedDataParallel, .* save the module in it, model.module, whose names",
            ),
            ("", "module", r"'m.module.0.bias' is 'm.0.bias' in .* wrapped by DistributedDataParallel, and where"),
            (
                "",
                "module._orig_mod",
                r"by DistributedDataParallel and torch.compile, .* put .*, model.module._orig_mod, into",
            ),
            (
                "",
                "_orig_mod.module",
                r"by torch.compile and DistributedDataParallel, .* put .*, model._orig_mod.module, into",
            ),
            (
                "_orig_mod.module",
                "",
                r"saved wrapped by torch.compile and DistributedDataParallel, .* save .*, model._orig_mod.module, whose",
            ),
            (
                "_orig_mod.module",
                "module",
                r"saved wrapped by torch.compile, .* save the module in it, model._orig_mod,",
            ),
            ("module._orig_mod", "_orig_mod.module", r"by torch.compile and DistributedDataParallel in another order"),
            (
                "_orig_mod",
                "module",
                r"wrapped by DistributedDataParallel, .*; and it was saved wrapped by torch.compile",
            ),
        ],
    )
    @pytest.mark.parametrize("is_table", [False, True])
    def test_names_with_what_a_wrapper_adds(
        self, saved: str, here: str, said: str, is_table: bool, tmp_path: Path
    ) -> None:
        """As a module, and as the table of its tensors."""

        def made(names: str) -> torch.nn.Module:
            module: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(3, 2))
            for name in reversed(names.split(".") if names else []):
                outer = torch.nn.Module()
                outer.add_module(name, module)
                module = outer
            return module

        save_dcp({"m": made(saved).state_dict()}, tmp_path / "wrapped")
        state: Any = {"m": made(here).state_dict() if is_table else made(here)}
        with pytest.raises(CheckpointError, match=said):
            restore_state(str(tmp_path / "wrapped"), state, timeout_s=60.0)
        if is_table:
            with pytest.raises(CheckpointError, match=said):
                loaderkit.restore(tmp_path / "wrapped", state, strict=False)

    def test_what_wrappers_really_add(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        compiled: Any = torch.compile(model)
        save_dcp({"m": compiled.state_dict()}, tmp_path / "compiled")
        with pytest.raises(CheckpointError, match=r"saved wrapped by torch.compile"):
            restore_state(str(tmp_path / "compiled"), {"m": model}, timeout_s=60.0)

    def test_what_only_the_checkpoint_has_is_left_out(self, url: str) -> None:
        x = torch.zeros(3)
        restore_state(url, {"x": x}, timeout_s=60.0)
        assert x.tolist() == [1, 1, 1]

    def test_no_state_at_all(self, url: str) -> None:
        with pytest.raises(ConfigError, match="expected a dict"):
            restore_state(url, torch.nn.Linear(1, 1), timeout_s=60.0)  # type: ignore[arg-type]


def test_what_could_not_be_restored_is_refused_when_it_is_saved() -> None:
    for value in (object(), [1, {"a": print}], lambda: 0, Path("x")):
        with pytest.raises(ConfigError, match="without running code"):
            resolve({"a": {"b": value}})
    for keys in ([Path("x")], [1, "1"], [True], [1.5], [(1, 2)]):
        with pytest.raises(ConfigError, match=r"the keys of 'a\.b' are not all text, or all whole numbers"):
            resolve({"a": {"b": dict.fromkeys(keys, 1)}})
    state = {
        "a": [1, 2.5, None, "x", b"y", {3}, (4,), torch.Size([1])],
        "n": torch.ones(2).numpy(),
        "m": {1: {}, -2: 3},
    }
    containers = resolve(state).containers
    assert {path: one.numbered for path, one in containers.items()} == {("m",): True, ("m", 1): False}


@pytest.mark.parametrize(
    "table",
    [
        {"groups": [{}, {"m": 1}]},
        {"groups": [None, {}, {"m": 1}, {}]},
        {"groups": [{}]},
        {"by": {0: {}, 1: {"m": 2}, 2: {"deep": {}}}},
        {"a": {}, "b": [[], {}, ()]},
        {},
    ],
)
def test_empty_tables_come_back(table: dict[Any, Any], tmp_path: Path) -> None:
    """Nothing in a list takes the place of an empty table before it."""
    save_dcp(saved_by_manager({"object": table, "plain": table, "n": 1}), tmp_path / "step")
    for fresh in (HoldsTable({}), HoldsTable(table)):
        state = {"object": fresh, "plain": {}, "n": 0}
        restore_state(str(tmp_path / "step"), state, timeout_s=60.0)
        assert fresh.table == state["plain"] == table


@pytest.mark.parametrize(("saved", "here"), [({"1": 1, "0": 2}, []), ([{"a": 1}], {})])
def test_a_table_is_no_list(saved: Any, here: Any, tmp_path: Path) -> None:
    save_dcp({"x": saved, "n": 1}, tmp_path / "step")
    state = {"x": here, "n": 0}
    with pytest.raises(CheckpointError, match="only in the checkpoint: 'x"):
        restore_state(str(tmp_path / "step"), state, timeout_s=60.0)
    assert state == {"x": here, "n": 0}
    assert not here


def test_a_scheduler_s_milestones_stay_countable(tmp_path: Path) -> None:
    """`MultiStepLR` puts what it gets in the place of its Counter, whose `elements` it calls later."""
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), [2, 2, 4])
        for _ in range(2)
    ]
    save_dcp(resolved_state({"s": schedulers[0]}), tmp_path / "step")
    restore_state(str(tmp_path / "step"), {"s": schedulers[1]}, timeout_s=60.0)
    assert schedulers[1].milestones == Counter([2, 2, 4])
    assert type(schedulers[1].milestones) is Counter
