"""`kind: iterable`: every rank's share in order with all executors, resumed exactly, and an end that shows when it comes."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from executors import EXECUTORS
from filtering import keep
from iterables import READ, Continuing, Counting, Sharing, Stateful, Uncopyable, counting
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.errors import ConfigError, SourceError, StageError

INLINE = EXECUTORS["inline"]


def expected(size: int, batch: int, *, rank: int, world_size: int, drop_last: bool) -> list[list[int]]:
    """The batches of an epoch, in plain Python."""
    batches = []
    for begin in range(0, size, batch * world_size):
        whole = range(begin, min(begin + batch * world_size, size))
        if len(whole) < (batch * world_size if drop_last else world_size):
            break  # not every rank has a batch of it
        batches.append(list(whole)[rank::world_size])
    return batches


def taken(loader: loaderkit.Loader, most: int = 10**6) -> list[tuple[int, list[int]]]:
    """(epoch, numbers) of the next batches of at most two epochs."""
    batches: list[tuple[int, list[int]]] = []
    for _ in range(3):  # a state from an epoch's last batch is resumed with nothing more of it
        for batch in loader if len(batches) < most else ():
            (epoch,) = set(batch["epoch"].tolist())
            batches.append((epoch, batch["x"].tolist()))
            if len(batches) == most:
                break
    return batches


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_rank_gets_its_share_in_order(executor: str, rng: random.Random) -> None:
    size, batch, world_size = rng.randrange(30, 120), rng.randrange(1, 7), rng.randrange(1, 4)
    rank, drop_last = rng.randrange(world_size), rng.random() < 0.5
    kinds: list[Any] = [Counting, Stateful, Continuing, Sharing]
    kind: Any = rng.choice([*kinds, *(f"iterables:{one.__name__}" for one in kinds), "iterables:counting"])
    source: dict[str, Any] = (
        {"object": kind, "args": {"size": size}} if isinstance(kind, str) else {"object": kind(size)}
    )
    if rng.random() < 0.5:
        source["length"] = size = rng.randrange(world_size * batch, size + 1)
    made = Pipeline.iterable(**source).epochs(2).read().batch(batch, drop_last=drop_last)
    ranks: dict[str, Any] = {"rank": rank, "world_size": world_size}
    numbers = expected(size, batch, rank=rank, world_size=world_size, drop_last=drop_last)
    whole = [(epoch, one) for epoch in ((0, 0) if "counting" in str(kind) else (0, 1)) for one in numbers]
    done = rng.randrange(1, len(whole) + 1)
    with loaderkit.build(made, **ranks, overrides=EXECUTORS[executor]) as loader:
        assert taken(loader, done) == whole[:done]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        assert taken(loader) == whole[done:]
    with loaderkit.build(made, **ranks, overrides=EXECUTORS[executor]) as loader:
        loader.load_state_dict(state)
        assert taken(loader) == whole[done:]
        assert loader.stats().num_samples == sum(len(one) for _, one in whole[done:])


def test_a_state_is_resumed_by_another_number_of_ranks() -> None:
    made = Pipeline.iterable(Stateful(50)).read().batch(4)
    with loaderkit.build(made, rank=1, world_size=3, overrides=INLINE) as loader:
        iterator = iter(loader)
        assert [next(iterator)["x"].tolist() for _ in range(2)] == [[1, 4, 7, 10], [13, 16, 19, 22]]
        state = loader.state_dict()
    rest = []
    for rank in range(2):
        with loaderkit.build(made, rank=rank, world_size=2, overrides=INLINE) as loader:
            loader.load_state_dict(state)
            rest += [x for batch in loader for x in batch["x"].tolist()]
    assert sorted(rest) == list(range(24, 50))


@pytest.mark.parametrize(("resume", "first"), [("auto", 24), ("skip", 0)])
def test_it_is_resumed_by_its_own_state_or_by_skipping(resume: Literal["auto", "skip"], first: int) -> None:
    made = Pipeline.iterable(Stateful(50), resume=resume).epochs(2).read().batch(8)
    with loaderkit.build(made, overrides=INLINE) as loader:
        taken(loader, 3)
        state = loader.state_dict()
    assert len(state["source"]) == (resume == "auto")
    with loaderkit.build(made, overrides=INLINE) as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        READ.clear()
        assert next(iterator)["x"].tolist() == list(range(24, 32))
        assert [*range(8), *range(first, 32)] == READ  # the first ones show what a batch holds


@pytest.mark.integration
@pytest.mark.parametrize("resume", ["auto", "skip"])
def test_a_streaming_data_set_of_hugging_faces_is_resumed_exactly(
    resume: Literal["auto", "skip"], rng: random.Random
) -> None:
    datasets: Any = importlib.import_module("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(60)), "epoch": [0] * 60})
    streamed = rows.to_iterable_dataset(num_shards=3)
    if rng.random() < 0.5:
        streamed = streamed.map(lambda row: row)
    made = Pipeline.iterable(streamed, resume=resume).epochs(2).read().batch(7)
    with loaderkit.build(made) as loader:
        whole = taken(loader)
    assert [x for _, batch in whole for x in batch] == [*range(60)] * 2
    for _ in range(3):
        done = rng.randrange(1, len(whole) + 1)
        with loaderkit.build(made) as loader:
            assert taken(loader, done) == whole[:done]
            state = json.loads(json.dumps(loader.state_dict()))
        with loaderkit.build(made) as loader:
            loader.load_state_dict(state)
            assert taken(loader) == whole[done:]


@pytest.mark.parametrize("kind", [Counting, Stateful, Continuing, Sharing])
def test_each_epoch_begins_at_the_first_item(kind: Any, rng: random.Random) -> None:
    """Also after a `break`, whatever was read ahead, and in what the caller still has."""
    given = kind(40)
    with loaderkit.build(Pipeline.iterable(given).read().batch(4), overrides=EXECUTORS["thread"]) as loader:
        for epoch in range(4):
            for number, batch in enumerate(loader):
                assert batch["x"].tolist() == list(range(4 * number, 4 * number + 4))
                assert set(batch["epoch"].tolist()) == {epoch} == {loader.epoch}
                if rng.random() < 0.2:
                    break
            assert loader.epoch == epoch
    assert [item["x"] for item in given] == list(range(40))


def test_the_first_item_is_changed_once() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    made = Pipeline.iterable(lambda: iter([{"x": tensor} for tensor in tensors])).read().call(add_one).batch(1)
    with loaderkit.build(made, overrides=INLINE) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[[1.0, 1.0]]] * 3


def add_one(sample: dict[str, Any]) -> None:
    sample["x"] += 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_has_its_state(tmp_path: Path) -> None:
    """Also for a loader that has no state of its own yet, into whose state torch's `load` reads."""
    made = Pipeline.iterable(Stateful(50)).read().batch(8)
    with loaderkit.build(made, overrides=INLINE) as loader:
        taken(loader, 3)
        saved = loader.state_dict()
    assert saved["source"] == ({"num_read": 24},)
    save({"loader": saved}, checkpoint_id=tmp_path)
    with loaderkit.build(made, overrides=INLINE) as loader:
        state = {"loader": loader.state_dict()}
        load(state, checkpoint_id=tmp_path)
        loader.load_state_dict(state["loader"])
        READ.clear()
        assert next(iter(loader))["x"].tolist() == list(range(24, 32))
        assert [*range(8), *range(24, 32)] == READ


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", ["nodes", "stateful_dataloader"])
def test_loaders_of_torchdata_are_iterables(name: str, rng: random.Random) -> None:
    torchdata: Any = importlib.import_module(f"torchdata.{name}")
    if name == "nodes":
        given: Any = torchdata.Loader(torchdata.IterableWrapper(range(60)))
    else:
        given = torchdata.StatefulDataLoader(list(range(60)), batch_size=None)
    made = Pipeline.iterable(given).epochs(2).read().batch(7)
    with loaderkit.build(made) as loader:
        whole = [batch["0"].tolist() for _ in range(2) for batch in loader]
    assert [x for batch in whole for x in batch] == [*range(60)] * 2
    done = rng.randrange(1, len(whole))
    with loaderkit.build(made) as loader:
        batches = (batch["0"].tolist() for _ in range(2) for batch in loader)
        assert [next(batches) for _ in range(done)] == whole[:done]
        state = loader.state_dict()
    with loaderkit.build(made) as loader:
        loader.load_state_dict(state)
        assert [batch["0"].tolist() for _ in range(3) for batch in loader] == whole[done:]


def test_items_that_cannot_be_copied_and_many_that_are_dropped() -> None:
    most = 0

    def items() -> Any:
        nonlocal most
        for number in range(100):
            most = max(most, len(Uncopyable.alive))
            yield {"x": Uncopyable(number)}

    def take_number(sample: dict[str, Any]) -> None:
        sample["x"] = sample["x"].number

    made = Pipeline.iterable(items).read().filter(lambda sample: sample["x"].number >= 60).call(take_number)
    with loaderkit.build(made.batch(20), overrides=INLINE) as loader, pytest.raises(StageError, match="left nothing"):
        next(iter(loader))
    assert most <= 21, "the first sixty are looked at, and not kept"
    with loaderkit.build(made.batch(100), overrides=INLINE) as loader:
        assert [batch["x"].tolist() for batch in loader] == [list(range(60, 100))]


def test_a_filter_drops_its_items() -> None:
    made = Pipeline.iterable("iterables:counting", args={"size": 300}).epochs(2).read()
    kept = made.filter(keep, args={"share": 0.3}, on_empty_batch="skip").batch(8)
    with loaderkit.build(kept, overrides=INLINE) as loader:
        found = [x for batch in loader for x in batch["x"].tolist()]
        assert loader.stats().num_dropped == 300 - len(found)
    with loaderkit.build(made.batch(300), overrides=INLINE) as loader:
        assert found == [x for batch in loader for x in batch["x"].tolist() if keep({"x": x}, 0.3)]
    nothing = made.filter(keep, args={"share": -1}).batch(8)
    with (
        loaderkit.build(nothing, overrides=INLINE) as loader,
        pytest.raises(StageError, match="filter dropped 300 of the 300 samples tried"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_a_failure_of_the_iterable_is_no_bad_sample(executor: str) -> None:
    made = Pipeline.iterable("iterables:failing", args={"size": 10}).read().batch(4).errors(on_bad_sample="skip")
    with loaderkit.build(made, overrides=EXECUTORS[executor]) as loader:
        iterator = iter(loader)
        assert [next(iterator)["x"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(SourceError, match="failed at item 10 of epoch 0: OSError: the line is dead"):
            next(iterator)


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    class Lines(Counting):
        file = None

        def __iter__(self) -> Any:
            return iter(self.file or ())

    lines = Lines(0)
    (tmp_path / "lines.txt").write_text("one")
    with (
        (tmp_path / "lines.txt").open() as lines.file,  # type: ignore[assignment]
        pytest.raises(ConfigError, match=r"the .*Lines cannot be copied .*: give a function that makes it"),
    ):
        loaderkit.build(Pipeline.iterable(lines).read().batch(4))


def test_what_can_be_read_once_only_is_found_out() -> None:
    with pytest.raises(
        ConfigError, match="expected an iterable that can be iterated over again for each epoch, not a generator, which"
    ):
        loaderkit.build(Pipeline.iterable(counting(10)).read().batch(4))
    items = counting(10)
    with loaderkit.build(Pipeline.iterable(lambda: items).read().batch(4), overrides=INLINE) as loader:
        assert len(list(loader)) == 3
        with pytest.raises(SourceError, match="returned the same object a second time"):
            list(loader)
    stateful = Continuing(40)
    with loaderkit.build(Pipeline.iterable(lambda: stateful).read().batch(4), overrides=INLINE) as loader:
        next(iter(loader))
        with pytest.raises(SourceError, match="returned the same object a second time"):
            next(iter(loader))
    with (
        loaderkit.build(Pipeline.iterable([]).read().batch(4), overrides=INLINE) as loader,
        pytest.raises(SourceError, match="has no items"),
    ):
        list(loader)


def test_what_needs_another_order_is_refused() -> None:
    made = Pipeline.iterable(Counting(10)).read().batch(4)
    assert made.config.order.shuffle == "none"
    with pytest.raises(ConfigError, match="an iterable's items come in its own order"):
        loaderkit.build(made.shuffle("global"))
    with pytest.raises(ConfigError, match="an iterable has no other sample at hand"):
        loaderkit.build(made.errors(on_bad_sample="replace"))
    with pytest.raises(ConfigError, match="an object with __iter__, or a function that returns one, not int"):
        loaderkit.build(Pipeline.iterable(3).read().batch(4))


YAML = """
source: {kind: iterable, object: "iterables:Stateful", args: {size: 20}}
stages: [read, {batch: {size: 8}}]
"""


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, state = tmp_path / "stream.yaml", tmp_path / "state.json"
    path.write_text(YAML)
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "samples       not known before the iterable ends" in said
    assert (
        "resume        by its own state, as exact as that is; every rank and loading process iterates over all of it"
        in said
    )
    assert main(["run", str(path), "--batches", "2", "--save-state", str(state), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 16
    assert main(["run", str(path), "--epochs", "2", "--resume", str(state), "--json"]) == 0
    ran = json.loads(capsys.readouterr().out)
    assert (ran["epochs"], ran["batches"], ran["samples"]) == (2, 4, 24)
    assert main(["explain", str(path)]) == 0
    assert "# batches   any number per epoch on one rank, batch size 8" in capsys.readouterr().out


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        ("Stateful, length: 20", ["samples       20", "batches       3 per epoch"], ["two passes", "not exact"]),
        ("Buffered", ["not exact: what was resumed from it"], ["two passes"]),
        ("Buffered, resume: skip", ["by iterating up to there"], ["two passes", "not exact"]),
        ("unseeded", ["two passes of one epoch gave other items"], ["not exact"]),
    ],
)
def test_check_compares_passes_and_states(
    name: str, said: list[str], unsaid: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stream.yaml"
    kind, _, settings = name.partition(",")
    path.write_text(YAML.replace('"iterables:Stateful"', f'"iterables:{kind}"{"," if settings else ""}{settings}'))
    assert main(["check", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(one.split()) in printed for one in said), printed
    assert not any(one in printed for one in unsaid), printed
