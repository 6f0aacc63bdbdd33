"""What a manager saves comes back into the very state it was saved from: states that grow, are lazy, shared, or in tuples."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_states import HoldsTable, save_dcp
from numpy.random.mtrand import set_bit_generator
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit.checkpoint import RngState, latest
from loaderkit.checkpoint.restore.stateful import restore_state
from loaderkit.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
Formats = pytest.mark.parametrize("kind", ["dcp", "safetensors"])


def there_and_back(folder: Path, saved: dict[str, Any], state: dict[str, Any], kind: str = "dcp") -> dict[str, Any]:
    with loaderkit.CheckpointManager(folder, format=kind) as checkpoints:
        checkpoints.save(1, saved)
    with loaderkit.CheckpointManager(folder, format=kind) as checkpoints:
        assert checkpoints.restore(state) == 1
    return state


class Extra(torch.nn.Module):
    """Has an extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS: list[Any] = [None, {}, {"a": 1, "history": [1, 2]}, {1: 2.5, 7: {}}, [{"a": 1}], (3, "x"), 5]


@Formats
def test_an_extra_state_may_be_any_other_than_it_is(kind: str, rng: random.Random, tmp_path: Path) -> None:
    saved: Any = torch.nn.ModuleList(Extra(extra) for extra in EXTRAS)
    model: Any = torch.nn.ModuleList(Extra(rng.choice(EXTRAS)) for _ in EXTRAS)
    there_and_back(tmp_path, {"model": saved}, {"model": model}, kind)
    assert [module.extra for module in model] == EXTRAS
    assert torch.equal(model[3].weight, saved[3].weight)


def test_an_extra_state_that_is_a_tensor_grows(rng: random.Random, tmp_path: Path) -> None:
    size = rng.randrange(3, 9)
    model = Extra(torch.zeros(2))
    there_and_back(tmp_path, {"model": Extra(torch.arange(size))}, {"model": model})
    assert model.extra.tolist() == [*range(size)]


def lazy() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())


def test_a_lazy_module(tmp_path: Path) -> None:
    saved, model = lazy(), lazy()
    with pytest.raises(ConfigError, match=r"'model\.0\.weight' belongs to a lazy module .* after its first batch"):
        there_and_back(tmp_path, {"model": saved}, {"model": model})
    data = torch.randn(4, 5)
    saved(data)
    there_and_back(tmp_path, {"model": saved}, {"model": model})
    assert torch.equal(model.eval()(data), saved.eval()(data))


@Formats
def test_tuples_with_tensors(kind: str, tmp_path: Path) -> None:
    """As the hidden state of an LSTM; torch reads them, too, where they are one value."""
    layer = OrderedDict(weight=torch.ones(2))  # as `state_dict` gives it
    hidden = (torch.randn(1, 2), (torch.arange(3), "x"), [torch.ones(1)], layer, {"a": [torch.ones(3)]})
    state = {"w": torch.ones(100, 100), "hidden": hidden, "deep": {"pairs": [(torch.ones(1), 2)]}}
    empty: dict[str, Any] = {}
    blank = (torch.zeros(1, 2), (torch.zeros(3), ""), [torch.zeros(1)], OrderedDict(empty), empty)
    fresh = {"w": torch.zeros(100, 100), "hidden": blank,
             "deep": {"pairs": [(torch.zeros(1), 0)]}}  # fmt: skip
    there_and_back(tmp_path, state, fresh, kind)
    assert repr(fresh) == repr(state)
    assert (
        sum(file.stat().st_size for file in Path(str(latest(tmp_path))).iterdir()) < 60_000
    )  # each pickled without the rest
    if kind == "dcp":
        tables: dict[str, Any] = {"w": torch.zeros(100, 100), "hidden": None, "deep": {"pairs": None}}
        load(tables, checkpoint_id=str(latest(tmp_path)), no_dist=True)
        assert repr(tables) == repr(state)


def test_tuples_with_objects(tmp_path: Path) -> None:
    """Their tensors are stored as tensors, and the values beside them are replaced."""
    state: dict[str, Any] = {"both": (torch.nn.Linear(2, 2), 7, torch.ones(2))}
    fresh: dict[str, Any] = {"both": (torch.nn.Linear(2, 2), 0, torch.zeros(2))}
    model = fresh["both"][0]
    there_and_back(tmp_path, state, fresh)
    assert fresh["both"][0] is model
    assert torch.equal(model.weight, state["both"][0].weight)
    assert fresh["both"][1] == 7
    assert fresh["both"][2].tolist() == [1, 1]
    assert type(loaderkit.restore(latest(tmp_path), nested=True)["both"]) is tuple


def test_tensors_in_tuples_that_could_not_be_read_are_refused(tmp_path: Path) -> None:
    for tensor in (
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.empty(1, device="meta"),
    ):
        with pytest.raises(ConfigError, match=r"'a' holds an object of .*Tensor \(in a tuple or set\)"):
            there_and_back(tmp_path, {"a": (1, tensor)}, {})


class Average:
    """Of weights; until its first update it is the weights themselves."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: param.detach() for name, param in model.named_parameters()}

    def update(self) -> None:
        self.shadow = {name: tensor * 0.5 for name, tensor in self.shadow.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


@Formats
@pytest.mark.parametrize("is_updated", [False, True])
@pytest.mark.parametrize("is_object", [False, True])
def test_an_average_that_shares_memory_with_its_model(
    kind: str, is_updated: bool, is_object: bool, tmp_path: Path
) -> None:
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    averages = [Average(model) for model in models]
    if is_updated:
        averages[0].update()
    expected = {name: tensor.clone() for name, tensor in averages[0].shadow.items()}
    states = [
        {"model": model, "average": average if is_object else average.shadow}
        for model, average in zip(models, averages, strict=True)
    ]
    there_and_back(tmp_path, states[0], states[1], kind)
    assert torch.equal(models[1].weight, models[0].weight)
    for name, tensor in expected.items():
        assert torch.equal(averages[1].shadow[name], tensor)


def test_modules_that_share_memory_and_did_not_when_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"'ema\.weight' is the same memory as 'model\.weight'"):
        there_and_back(
            tmp_path, {"model": torch.nn.Linear(3, 2), "ema": torch.nn.Linear(3, 2)}, {"model": model, "ema": model}
        )
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("make", [np.random.PCG64, np.random.Philox, np.random.SFC64, np.random.MT19937])
def test_numpy_s_global_generator_of_another_kind(
    make: Callable[[int], Any], rng: random.Random, tmp_path: Path
) -> None:
    try:
        set_bit_generator(make(rng.randrange(2**31)))
        np.random.randn()
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, {"rng": RngState(0)})
        expected = np.random.randn(3).tolist()
        set_bit_generator(np.random.PCG64(1))
        with loaderkit.CheckpointManager(tmp_path) as checkpoints:
            checkpoints.restore({"rng": RngState(0)})
        assert np.random.randn(3).tolist() == expected
    finally:
        set_bit_generator(np.random.MT19937(0))


# ---------------------------------------------------------------------------------------------------------- wrappers


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=vars(dist)["HashStore"](), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))


def inner_compiled() -> Any:
    model: Any = made()
    model[0] = torch.compile(model[0], backend="eager")
    return model


WRAPPED: dict[str, Callable[[], Any]] = {
    "plain": made,
    "compiled": lambda: torch.compile(made(), backend="eager"),
    "a layer compiled": inner_compiled,
    "parallel": lambda: torch.nn.parallel.DistributedDataParallel(made()),
    "both": lambda: torch.nn.parallel.DistributedDataParallel(torch.compile(made(), backend="eager")),
}


@pytest.mark.matrix(8)
@Formats
@pytest.mark.parametrize(
    ("saved", "here"), [(one, other) for one in WRAPPED for other in WRAPPED if {one, other} & {"plain", "both"}]
)
def test_what_wrappers_add_is_left_out(saved: str, here: str, kind: str, one_rank: None, tmp_path: Path) -> None:
    """Any fits any, with its optimizer, and other programs find the model's own names."""
    models = [WRAPPED[saved](), WRAPPED[here]()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for param in models[0].parameters():
        param.grad = torch.randn(param.shape)
    optimizers[0].step()
    states = [dict(zip(("model", "optimizer"), both, strict=True)) for both in zip(models, optimizers, strict=True)]
    there_and_back(tmp_path, states[0], states[1], kind)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)
        assert torch.equal(
            *(optimizer.state[p]["momentum_buffer"] for optimizer, p in zip(optimizers, (first, second), strict=True))
        )
    folder = Path(str(latest(tmp_path)))
    if kind == "safetensors":
        assert load_file(folder / "model.safetensors").keys() == made().state_dict().keys()
    plain: Any = made()
    plain.load_state_dict(loaderkit.restore(folder, nested=True)["model"])
    assert torch.equal(plain[2].weight, [*models[0].parameters()][2])


@Formats
@pytest.mark.parametrize("name", ["compiled", "a layer compiled", "parallel", "both"])
def test_tables_with_what_wrappers_add_are_refused(name: str, kind: str, one_rank: None, tmp_path: Path) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"'a\.model' has '.*', a name that (torch.compile|DistributedDataParallel).* has made"
        ),
        loaderkit.CheckpointManager(tmp_path, format=kind) as checkpoints,
    ):
        checkpoints.save(1, {"a": {"model": WRAPPED[name]().state_dict()}})


def test_a_checkpoint_of_before_has_the_names_of_wrappers(one_rank: None, tmp_path: Path) -> None:
    models = [WRAPPED["both"]() for _ in range(2)]
    save_dcp({"model": models[0].state_dict()}, tmp_path / "step")
    restore_state(str(tmp_path / "step"), {"model": models[1]}, timeout_s=60.0)
    assert torch.equal(*(next(model.parameters()) for model in models))


@Formats
def test_keys_of_the_state_of_an_object(kind: str, tmp_path: Path) -> None:
    """They come back as they were, or are refused: not as text."""
    whole = HoldsTable({})
    there_and_back(tmp_path / "whole", {"o": HoldsTable({0: torch.ones(1), 7: 2})}, {"o": whole}, kind)
    assert whole.table == {0: torch.ones(1), 7: 2}
    odd: list[dict[Any, Any]] = [{0: 1, "name": 2}, {(0, 1): torch.ones(2)}, {None: 1}, {True: 1}, {1.5: 1}, {b"a": 1}]
    for number, table in enumerate(odd):
        with (
            loaderkit.CheckpointManager(tmp_path / str(number), format=kind) as checkpoints,
            pytest.raises(ConfigError, match="the keys of 'o' are not all text"),
        ):
            checkpoints.save(1, {"o": HoldsTable(table)}, wait=True)


@Formats
def test_a_tensor_that_shares_its_elements_is_not_filled(kind: str, tmp_path: Path) -> None:
    """All is compared first, so the others keep what they had."""
    saved = {"a": torch.ones(3), "x": torch.ones(4, 4), "z": torch.ones(3)}
    for number, shared in enumerate((torch.zeros(1).expand(4, 4), torch.zeros(10).as_strided((4, 4), (1, 1)))):
        state = {"a": torch.zeros(3), "x": shared, "z": torch.zeros(3)}
        with pytest.raises(CheckpointError, match=r"'?x'? is expanded, or overlaps itself"):
            there_and_back(tmp_path / str(number), saved, state, kind)
        assert not torch.cat([state["a"], state["z"]]).any()
    kept = torch.zeros(4, 8)[:, ::2].t()  # has gaps, and shares none
    there_and_back(tmp_path / "fits", {"x": torch.ones(4, 4)}, {"x": kept}, kind)
    assert kept.all()


def test_tensors_that_share_a_part_of_their_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = torch.arange(4.0)
    there_and_back(tmp_path, {"a": torch.ones(3), "b": torch.full((3,), 2.0)}, {"a": memory[:3], "b": memory[1:]})
    assert "'a' and 'b' share a part of their memory" in caplog.text
