"""`filter`: as a plain filter of every batch, with all executors, after a resume, on every rank; and what counts as dropped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from conftest import HELPERS
from executors import EXECUTORS
from filtering import fail_at_seven, is_kept, keep, keep_but, keep_by_draw, keep_from, numbers
from torch.utils.data import DataLoader

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.errors import ConfigError, StageError

INLINE = EXECUTORS["inline"]


def taken(loader: loaderkit.Loader, most: int | None = None) -> list[list[int]]:
    """The numbers of the next batches, of all epochs; each batch is checked."""
    batches: list[list[int]] = []
    while len(batches) != most:
        before = len(batches)
        for batch in loader:
            batches.append(batch["x"].tolist())
            assert batch["__key__"] == list(map(str, batches[-1]))
            assert batch["row"].tolist() == [[number] * 3 for number in batches[-1]]
            if len(batches) == most:
                break
        if len(batches) == before:
            break
    return batches


@pytest.mark.parametrize("executor", EXECUTORS)
def test_batches_are_those_without_it_filtered(executor: str, rng: random.Random) -> None:
    batch, drop_last, share = rng.randrange(5, 9), rng.random() < 0.5, rng.choice([0.3, 0.8, 1.0])
    size = batch * rng.randrange(6, 14) + rng.choice([0, 4])  # no batch is smaller than the number of bad samples
    bad = tuple(rng.sample(range(size), 3))
    made = numbers(size, bad).shuffle(seed=rng.randrange(2**32)).errors(on_bad_sample="skip")
    with loaderkit.build(made.batch(batch, drop_last=drop_last), overrides=INLINE) as loader:
        whole = taken(loader)
    expected = [kept for numbers in whole if (kept := [x for x in numbers if is_kept(x, share)])]
    filtered = made.filter(keep, args={"share": share}, on_empty_batch="skip").batch(batch, drop_last=drop_last)
    done = rng.randrange(len(expected))
    with loaderkit.build(filtered, overrides=EXECUTORS[executor]) as loader:
        assert taken(loader, done) == expected[:done]
        state = json.loads(json.dumps(loader.state_dict()))
    with loaderkit.build(filtered, overrides=EXECUTORS[executor]) as loader:
        loader.load_state_dict(state)
        assert taken(loader) == expected[done:]
    with loaderkit.build(filtered, overrides=INLINE) as loader:
        assert taken(loader) == expected
        stats = loader.stats()
        assert stats.num_dropped == sum(map(len, whole)) - sum(map(len, expected))
        assert stats.num_batches == len(expected)
        assert {stage.name: stage.num_failed for stage in stats.stages}["filter"] == 0


def test_a_draw_is_the_samples_own(rng: random.Random) -> None:
    made = numbers(60).filter(keep_by_draw, on_empty_batch="skip").batch(6)
    with loaderkit.build(made, overrides=INLINE) as loader:
        epochs = [[batch["x"].tolist() for batch in loader] for _ in range(2)]
    assert epochs[0] != epochs[1]
    expected = epochs[0] + epochs[1]
    done = rng.randrange(1, len(expected))
    for executor in ("thread", "two processes"):
        with loaderkit.build(made, overrides=EXECUTORS[executor]) as loader:
            assert taken(loader, done) == expected[:done]
            state = loader.state_dict()
            assert loader.stats().num_dropped > 0
    with loaderkit.build(made, overrides=EXECUTORS["thread"]) as loader:
        loader.load_state_dict(state)
        assert taken(loader) == expected[done:]


def test_every_rank_filters_its_share() -> None:
    made = numbers(48).filter(keep, args={"share": 0.7}).batch(8)
    found = []
    for rank in range(2):
        with loaderkit.build(made, rank=rank, world_size=2, overrides=INLINE) as loader:
            found += [x for batch in loader for x in batch["x"].tolist()]
    assert sorted(found) == [x for x in range(48) if is_kept(x, 0.7)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_batch_of_which_nothing_is_left_is_an_error(executor: str) -> None:
    made = numbers(24).filter(keep_but, args={"low": 8, "high": 12}).batch(4)
    whole = [list(range(lo, lo + 4)) for lo in range(0, 24, 4)]
    with loaderkit.build(made, overrides=EXECUTORS[executor]) as loader:
        iterator = iter(loader)
        assert [next(iterator)["x"].tolist() for _ in range(2)] == whole[:2]
        with pytest.raises(
            StageError, match="filter left nothing of the batch at position 8 of epoch 0: it dropped 4 of 4 sam"
        ) as raised:
            next(iterator)
        state = loader.state_dict()
    assert (raised.value.stage, raised.value.epoch, raised.value.position) == ("filter", 0, 8)
    for remedy in ("larger batches", "out of the source", "`on_empty_batch: skip`"):
        assert remedy in str(raised.value)
    skipping = numbers(24).filter(keep_but, args={"low": 8, "high": 12}, on_empty_batch="skip").batch(4)
    with loaderkit.build(skipping, overrides=EXECUTORS[executor]) as loader:
        loader.load_state_dict(state)
        assert taken(loader, 3) == whole[3:]
    with (
        loaderkit.build(made, rank=1, world_size=2, overrides=EXECUTORS[executor] | {"stages.batch.size": 2}) as loader,
        pytest.raises(StageError, match="the batch at position 9 of epoch 0: it dropped 2 of 2 samples"),
    ):
        list(loader)


def test_what_is_left_may_be_bad() -> None:
    filtered = numbers(12, bad=(6,)).filter(keep_but, args={"low": 4, "high": 8}).batch(4).errors(on_bad_sample="skip")
    with (
        loaderkit.build(filtered, overrides=INLINE) as loader,
        pytest.raises(StageError, match="position 4 of epoch 0: it dropped 3 of 4 samples; the others were bad"),
    ):
        list(loader)


def test_empty_batches_may_be_skipped(caplog: pytest.LogCaptureFixture) -> None:
    made = numbers(24).filter(keep_from, args={"least": 10}, on_empty_batch="skip").batch(4)
    with loaderkit.build(made, overrides=INLINE) as loader:
        iterator = iter(loader)
        assert next(iterator)["x"].tolist() == [10, 11]
        state = loader.state_dict()
        assert len(list(iterator)) == 3
        assert taken(loader) == [[10, 11], *(list(range(lo, lo + 4)) for lo in (12, 16, 20))]
        loader.load_state_dict(state)
        assert taken(loader, 1) == [[12, 13, 14, 15]]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "filter left nothing of the batch at position 0 of epoch 0: it is skipped" in warnings[0]


def test_how_many_batches_come_is_not_said_before() -> None:
    made = numbers(24).filter(keep_from, args={"least": 10}, on_empty_batch="skip").batch(4)
    with loaderkit.build(made, overrides=INLINE) as loader:
        iterator = iter(loader)
        next(iterator)
        for unknown in (loader, iterator, loader.batch_sampler):
            with pytest.raises(
                TypeError, match="shows when it ends, as filter may leave nothing of some, so there is no len"
            ):
                len(unknown)
        assert (loader.num_samples, len(loader.dataset)) == (24, 24)
        assert "at most 6 batches of 4" in repr(loader)
        assert len(list(loader)) == 4  # `list` asks for a length, and does without
    rest = loader_of_batches(made)
    assert [batch["x"].tolist() for batch in rest] == [[10, 11], *(list(range(lo, lo + 4)) for lo in (12, 16, 20))]


def loader_of_batches(made: Pipeline, num_skipped: int = 0) -> DataLoader[Any]:
    """As Accelerate's `skip_first_batches` makes one."""
    loader: Any = loaderkit.build(made, overrides=INLINE)
    numbers: Any = islice(loader.batch_sampler, num_skipped, None)
    return DataLoader(loader.dataset, batch_sampler=numbers, collate_fn=loader.collate_fn)


def test_what_counts_batches_cannot_skip_them() -> None:
    made = numbers(24).filter(keep_but, args={"low": 4, "high": 8}).batch(4)
    counting: Any = {"rank": 0, "world_size": 1, "overrides": INLINE}
    with loaderkit.build(made, **counting) as loader:
        assert loader.dataset.__getitems__(2)["x"].tolist() == [8, 9, 10, 11]
    skipping = numbers(24).filter(keep_but, args={"low": 4, "high": 8}, on_empty_batch="skip").batch(4)
    with loaderkit.build(skipping, **counting) as loader:
        with pytest.raises(
            ConfigError, match="after 2 batches is not known, as filter may have skipped some: continue with"
        ):
            loader.dataset.__getitems__(2)
        assert loader.dataset.__getitems__(0)["x"].tolist() == [0, 1, 2, 3]
    rest = iter(
        loader_of_batches(skipping, num_skipped=9)
    )  # the Trainer counts over epochs: there may be no ninth batch
    with pytest.raises(ConfigError, match="after 9 batches is not known"):
        next(rest)


def test_several_ranks_cannot_skip_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    made = numbers(24).filter(keep_from, args={"least": 10}, on_empty_batch="skip").batch(4)
    refused = pytest.raises(
        ConfigError, match=r"filter: `on_empty_batch: skip` is for one rank, and there are 2: .* for ever"
    )
    with refused:
        loaderkit.build(made, rank=0, world_size=2)
    with loaderkit.build(made, overrides=INLINE) as loader:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        for use in (len, iter):
            with refused:
                use(loader)


def test_all_of_several_filters_have_to_skip() -> None:
    first = numbers(24).filter(keep_but, name="first", args={"low": 4, "high": 6}, on_empty_batch="skip")
    cases: list[tuple[Literal["raise", "skip"], int]] = [("raise", 1), ("skip", 5)]
    for second, number in cases:
        made = first.filter(keep_but, name="second", args={"low": 6, "high": 8}, on_empty_batch=second).batch(4)
        with loaderkit.build(made, overrides=INLINE) as loader:
            iterator = iter(loader)
            assert len([next(iterator) for _ in range(number)]) == number
            with pytest.raises(StageError if second == "raise" else StopIteration) as raised:
                next(iterator)
        assert second == "skip" or "first, second left nothing of the batch at position 4" in str(raised.value)


@pytest.mark.parametrize("executor", ["inline", "two processes"])
def test_a_filter_that_drops_everything_is_an_error(executor: str) -> None:
    made = numbers(24).filter(keep_from, args={"least": 100}).batch(4)
    with (
        loaderkit.build(made, overrides=EXECUTORS[executor]) as loader,
        pytest.raises(StageError, match="filter dropped 24 of the 24 samples tried"),
    ):
        next(iter(loader))


def test_an_epoch_of_which_nothing_is_left_is_an_error() -> None:
    made = numbers(24).filter(keep_from, args={"least": 23}, on_empty_batch="skip").batch(5, drop_last=True)
    with (
        loaderkit.build(made, overrides=INLINE) as loader,
        pytest.raises(StageError, match="filter dropped all samples of epoch 0, so there is nothing to deliver"),
    ):
        next(iter(loader))


def test_what_is_kept_may_be_far_from_the_first_sample() -> None:
    made = numbers(3000).filter(keep_from, args={"least": 2500}, on_empty_batch="skip").batch(500)
    with loaderkit.build(made, overrides=INLINE) as loader:
        assert next(iter(loader))["x"].tolist() == list(range(2500, 3000))


def test_bad_samples_and_dropped_ones_are_counted_apart() -> None:
    made = numbers().filter(fail_at_seven).batch(8).errors(on_bad_sample="skip", max_bad_samples=1)
    with loaderkit.build(made, overrides=INLINE) as loader:
        assert [x for batch in loader for x in batch["x"].tolist()] == [x for x in range(40) if x % 3 and x != 7]
        stats = loader.stats()
    assert stats.num_dropped == stats.to_dict()["num_dropped"] == 14
    assert {stage.name: stage.num_failed for stage in stats.stages if stage.num_failed} == {"filter": 1}
    with (
        loaderkit.build(numbers().filter(fail_at_seven).batch(8), overrides=INLINE) as loader,
        pytest.raises(StageError, match=r"filter failed for sample '7' .*seven"),
    ):
        next(iter(loader))


def test_what_replaces_a_bad_sample_may_be_dropped_too() -> None:
    made = numbers(40, bad=(0, 1, 2, 3, 4)).filter(keep, args={"share": 0.5}).batch(40).errors(on_bad_sample="replace")
    batches = []
    for executor in ("inline", "thread"):
        with loaderkit.build(made, overrides=EXECUTORS[executor]) as loader:
            batches.append(taken(loader, 2))
            assert loader.stats().num_dropped == 80 - sum(map(len, batches[-1]))
    assert batches[0] == batches[1]
    good = [x for x in range(5, 40) if is_kept(x, 0.5)]
    for batch in batches[0]:
        replaced = len(batch) - len(good)
        assert 0 <= replaced <= 5
        assert batch[replaced:] == good
        assert all(is_kept(x, 0.5) for x in batch)


@pytest.mark.parametrize(
    ("returned", "said"), [(None, "NoneType"), ({"x": 1}, "dict"), (torch.tensor([True, False]), "Tensor"), (1, "int")]
)
def test_anything_but_true_and_false_is_refused(returned: Any, said: str) -> None:
    with (
        loaderkit.build(numbers().filter(lambda sample: returned).batch(8), overrides=INLINE) as loader,
        pytest.raises(StageError, match=f"filter failed for sample '0' .*{said}"),
    ):
        next(iter(loader))


def test_it_sees_the_fields_of_its_place_and_changes_none(photos: Path) -> None:
    seen: list[Any] = []

    def see(sample: dict[str, Any]) -> bool:
        seen.append(sample["image"])
        keep_it = sample["__key__"].endswith("3.jpg")
        sample.clear()
        return bool(keep_it)

    read = Pipeline.files(photos, label="parent").shuffle(False).read()
    small = read.decode().resize([16, 16]).batch(60)
    made = read.filter(see).decode().resize([16, 16]).filter(see).batch(60)
    with loaderkit.build(small, overrides=INLINE) as loader:
        whole = next(iter(loader))
    with loaderkit.build(made, overrides=INLINE) as loader:
        batch = next(iter(loader))
    slots = [slot for slot, key in enumerate(whole["__key__"]) if key.endswith("3.jpg")]
    assert torch.equal(batch["image"], whole["image"][slots])
    assert torch.equal(batch["label"], whole["label"][slots])
    assert batch["__key__"] == [whole["__key__"][slot] for slot in slots]
    assert {type(image) for image in seen} == {bytes, torch.Tensor}
    assert {tuple(image.shape) for image in seen if not isinstance(image, bytes)} == {(3, 16, 16)}


def test_behind_batch_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="`filter` acts on single samples: put it before `batch`"):
        loaderkit.build(numbers().batch(8).filter(keep_by_draw))


YAML = """
source: {kind: dataset, object: "filtering:Numbers", args: {size: 40}}
order: {shuffle: none}
stages: [read, {filter: {function: "filtering:keep_from", args: {least: 12}, on_empty_batch: skip}}, {batch: {size: 8}}]
"""


def test_from_yaml_and_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(YAML)
    with loaderkit.build(path) as loader, loader.profile() as profile:
        assert [len(batch["x"]) for batch in loader] == [4, 8, 8, 8]
    assert (profile.num_samples, profile.num_dropped) == (28, 12)
    assert "28 samples in 4 batches, 12 more dropped by filter" in " ".join(str(profile).split())
    again = tmp_path / "again.yaml"
    again.write_text(Pipeline.from_yaml(path).to_yaml())
    assert Pipeline.from_yaml(again) == Pipeline.from_yaml(path)
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "batches       at most 5 per epoch" in said
    assert "dropped       12 of 16 samples tried for the first batch" in said
    assert main(["run", str(path), "--epochs", "2", "--json"]) == 0
    ran = json.loads(capsys.readouterr().out)
    assert (ran["epochs"], ran["batches"], ran["samples"], ran["dropped"]) == (2, 8, 56, 24)


def check_lightning(runs: Any) -> None:
    """It validates in each of two epochs."""
    assert runs["none empty"] == {"trained": 12, "validated": 2, "error": None}
    assert "filter left nothing of the batch at position 4 of epoch 0" in runs["raise"].pop("error")
    assert runs["raise"] == {"trained": 1, "validated": 0}
    assert runs["skip"] == {"trained": 10, "validated": 2, "error": None}
    assert runs["skip in validation"] == {"trained": 12, "validated": 2, "error": None}
    assert runs["said of a checkpoint"] == [1, 0], "it is a batch ahead of what it has trained"


def check_transformers(runs: Any) -> None:
    """It resumes behind the last batch trained."""
    whole = runs["none empty"]["whole"]
    assert len(whole) == 12
    assert runs["none empty"]["resumed"] == [whole[step:] for step in (1, 3, 5, 6, 7)]
    assert "filter left nothing of the batch at position 4 of epoch 0" in runs["raise"]
    assert "max_steps must be set to a positive value if dataloader does not have a length" in runs["without max_steps"]
    assert len(runs["skip"]["whole"]) == 10
    for resumed in runs["skip"]["resumed"]:
        assert "batches is not known, as filter may have skipped some: continue with load_state_dict" in resumed


@pytest.mark.integration
@pytest.mark.parametrize(("library", "check"), [("lightning", check_lightning), ("transformers", check_transformers)])
def test_other_loops_are_right_or_an_error_says_why_not(
    library: str, check: Callable[[Any], None], tmp_path: Path
) -> None:
    command = [sys.executable, str(HELPERS / "filtered_loops.py"), library, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    check(json.loads((tmp_path / "runs.json").read_text()))
