"""Bad samples skipped, replaced, counted and written down: the same with every executor."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_files import (  # noqa: F401 - fixtures
    NUM,
    THREADS,
    Items,
    UnluckyError,
    _folder,
    _nothing_left_running,
    called,
    damaged,
    failure,
    files,
    lines_of,
    no_dict,
    num_failed,
    other_shape,
    picture,
    raise_for_seven,
    threads_of_ours,
)
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import (
    ConfigError,
    StageError,
    TooManyBadSamplesError,
)

pytestmark = pytest.mark.matrix(8)


@pytest.mark.parametrize("executor", THREADS)
def test_skip(executor: str, folder: Path, tmp_path: Path) -> None:
    keys = [str(place.relative_to(folder)) for place in sorted(folder.rglob("*.jpg"))]
    bad = damaged(folder, [3, 4, 5, 19])
    quarantine = tmp_path / "bad.jsonl"
    made = files(folder, executor, on_bad_sample="skip", quarantine=str(quarantine)).epochs(2)
    with loaderkit.build(made) as loader:
        for epoch in range(2):
            batches = list(loader)
            found = [key for batch in batches for key in batch["__key__"]]
            assert found == [key for key in keys if key not in bad]
            assert [len(batch["image"]) for batch in batches] == [len(batch["__key__"]) for batch in batches]
            for batch in batches:
                for key, image, label in zip(batch["__key__"], batch["image"], batch["label"], strict=True):
                    index = int(key[2:4])
                    assert image.float().mean().item() == pytest.approx(40 + 6 * index, abs=4)
                    assert label.item() == "ab".index(key[0])
            assert len(lines_of(quarantine)) == 4 * (epoch + 1)
        assert num_failed(loader)["decode"] == 8
        assert num_failed(loader)["read"] == 0
    lines = lines_of(quarantine)
    assert all(line.keys() == {"key", "source", "stage", "error", "epoch", "position"} for line in lines)
    assert [line["key"] for line in lines] == sorted(bad) * 2
    assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4
    assert [line["position"] for line in lines] == [keys.index(key) for key in sorted(bad)] * 2
    for line in lines:
        assert line["stage"] == "decode"
        assert line["source"] == str(folder / line["key"])
        assert line["key"] in line["error"]


def test_skip_in_other_stages(folder: Path, tmp_path: Path) -> None:
    quarantine = tmp_path / "bad.jsonl"
    for function, stage in ((raise_for_seven, "mine"), (other_shape, "batch"), (no_dict, "mine")):
        quarantine.unlink(missing_ok=True)
        made = called(folder, function, "thread", on_bad_sample="skip", quarantine=str(quarantine)).epochs(1)
        with loaderkit.build(made) as loader:
            found = [key for batch in loader for key in batch["__key__"]]
            assert len(found) == NUM - 1
            assert "b/07.jpg" not in found
            assert num_failed(loader)[stage] == 1
        (line,) = lines_of(quarantine)
        assert (line["key"], line["stage"]) == ("b/07.jpg", stage)


def test_skip_of_what_vanished(folder: Path, tmp_path: Path) -> None:
    made = files(folder, on_bad_sample="skip", quarantine=str(tmp_path / "bad.jsonl")).epochs(1)
    with loaderkit.build(made) as loader:
        (folder / "a" / "04.jpg").unlink()
        found = [key for batch in loader for key in batch["__key__"]]
        assert len(found) == NUM - 1
        assert num_failed(loader)["read"] == 1
    (line,) = lines_of(tmp_path / "bad.jsonl")
    assert line["stage"] == "read"


@pytest.mark.parametrize("executor", THREADS)
def test_skip_of_a_whole_batch(executor: str, folder: Path) -> None:
    """Batch 1 of the canonical order is a/12 ... a/22."""
    damaged(folder, [12, 14, 16, 18, 20, 22])
    loader = loaderkit.build(files(folder, executor, on_bad_sample="skip"))
    iterator = iter(loader)
    assert len(next(iterator)["__key__"]) == 6
    with pytest.raises(StageError, match=r"all 6 samples of batch 1 of epoch 0 were bad"):
        next(iterator)
    assert threads_of_ours() == []


def test_skip_of_what_cannot_be_padded() -> None:
    class Mixed(Items):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.zeros(index, dtype=torch.int64 if index == 7 else torch.float32)}

    made = Pipeline.dataset(Mixed()).shuffle("none").read().batch(6, ragged={"x": "pad"}).errors(on_bad_sample="skip")
    with loaderkit.build(made.epochs(1)) as loader:
        assert [key for batch in loader for key in batch["__key__"]] == [str(n) for n in range(NUM) if n != 7]


def test_skip_with_padding_and_lists(folder: Path) -> None:
    class Words(Items):
        def __getitem__(self, index: int) -> Any:
            if index in self.bad:
                raise UnluckyError("bad")
            return {"x": torch.arange(index), "t": str(index), "r": torch.arange(index)}

    made = (
        Pipeline.dataset(Words(bad=(2, 5)))
        .shuffle("none")
        .read()
        .batch(6, ragged={"x": "pad", "r": "list"})
        .errors(on_bad_sample="skip")
    )
    with loaderkit.build(made) as loader:
        batch = next(iter(loader))
    assert batch["t"] == ["0", "1", "3", "4"]
    assert batch["x_sizes"].tolist() == [0, 1, 3, 4]
    assert batch["x"].tolist() == [[0] * 4, [0] * 4, [0, 1, 2, 0], [0, 1, 2, 3]]
    assert [tensor.tolist() for tensor in batch["r"]] == [[], [0], [0, 1, 2], [0, 1, 2, 3]]


def replacing(folder: Path, executor: Any, workers: int, batches: int = 4, **errors: Any) -> Pipeline:
    return (
        Pipeline.files(folder, label="parent")
        .shuffle(seed=5)
        .epochs(3)
        .read()
        .decode()
        .random_resized_crop(8)
        .random_horizontal_flip()
        .color_jitter(brightness=0.3, hue=0.1)
        .batch(6)
        .normalize()
        .prefetch(executor=executor, concurrency=workers, batches=batches)
        .errors(on_bad_sample="replace", **errors)
    )


def digest(batch: dict[str, Any]) -> tuple[Any, ...]:
    return (batch["__key__"], batch["label"].tolist(), batch["image"].numpy().tobytes())


BAD = [3, 4, 5, 9, 14, 19]


def test_replace(folder: Path, tmp_path: Path) -> None:
    bad = damaged(folder, BAD)
    quarantine = tmp_path / "bad.jsonl"
    with loaderkit.build(replacing(folder, "thread", 2, quarantine=str(quarantine))) as loader:
        for epoch in range(3):
            batches = list(loader)
            assert [len(batch["__key__"]) for batch in batches] == [6] * 4
            found = [key for batch in batches for key in batch["__key__"]]
            assert not set(found) & set(bad)
            # What is good comes exactly where it would have come; only bad places hold another.
            assert len(set(found)) >= NUM - len(BAD)
            assert all(batch["label"].tolist() == ["ab".index(key[0]) for key in batch["__key__"]] for batch in batches)
            lines = [line for line in lines_of(quarantine) if line["epoch"] == epoch]
            assert sorted(line["key"] for line in lines) == sorted(bad)
            own = [line for line in lines if line["stage"] == "decode"]
            assert len(own) == len(lines)
        assert num_failed(loader)["decode"] >= 3 * len(BAD)


def test_replace_leaves_good_slots_as_they_were(folder: Path) -> None:
    with loaderkit.build(replacing(folder, "thread", 2)) as loader:
        whole = list(loader)
    bad = damaged(folder, BAD)
    with loaderkit.build(replacing(folder, "thread", 2)) as loader:
        found = list(loader)
    for one, other in zip(whole, found, strict=True):
        for slot, key in enumerate(one["__key__"]):
            if key not in bad:
                assert other["__key__"][slot] == key
                assert torch.equal(other["image"][slot], one["image"][slot])
            else:
                assert other["__key__"][slot] not in bad


def test_a_replacement_is_randomised_by_its_own_index(folder: Path) -> None:
    """The same sample in the same epoch looks the same, whether it stands in its own place or replaces another."""
    damaged(folder, BAD)
    seen: dict[str, bytes] = {}
    num_repeated = 0
    with loaderkit.build(replacing(folder, "inline", 1)) as loader:
        for batch in loader:
            for key, image in zip(batch["__key__"], batch["image"], strict=True):
                content = image.numpy().tobytes()
                num_repeated += key in seen
                assert seen.setdefault(key, content) == content
    assert num_repeated >= len(BAD) - 1


@pytest.mark.parametrize(
    ("executor", "workers", "batches"),
    [
        ("inline", 1, 4),
        ("thread", 1, 1),
        ("thread", 2, 4),
        ("thread", 8, 16),
    ],
)
def test_replaced_batches_are_the_same_however_they_are_made(
    executor: str, workers: int, batches: int, folder: Path, tmp_path: Path
) -> None:
    damaged(folder, BAD)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with loaderkit.build(replacing(folder, "inline", 1, 1, quarantine=str(first))) as loader:
        expected = [[digest(batch) for batch in loader] for _ in range(3)]
    with loaderkit.build(replacing(folder, executor, workers, batches, quarantine=str(second))) as loader:
        found = [[digest(batch) for batch in loader] for _ in range(3)]
    assert found == expected
    assert lines_of(first) == lines_of(second)
    assert expected[0] != expected[1]


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_resuming_with_bad_samples(policy: Any, folder: Path) -> None:
    damaged(folder, BAD)
    made = replacing(folder, "thread", 2).errors(on_bad_sample=policy)
    with loaderkit.build(made) as loader:
        whole, states = [], []
        for batch in loader:
            whole.append(digest(batch))
            states.append(json.dumps(loader.state_dict()))
    for number, state in enumerate(states[:-1]):
        with loaderkit.build(made) as loader:
            loader.load_state_dict(json.loads(state))
            assert [digest(batch) for batch in loader] == whole[number + 1 :]


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_ranks_share_out_bad_samples(policy: Any, folder: Path, tmp_path: Path) -> None:
    bad = damaged(folder, BAD)
    quarantine = tmp_path / "bad.jsonl"
    made = replacing(folder, "thread", 2, quarantine=str(quarantine)).errors(on_bad_sample=policy)
    found: list[str] = []
    for rank in range(3):
        with loaderkit.build(made, rank=rank, world_size=3) as loader:
            for batch in loader:
                found += batch["__key__"]
    good = {f"{'ab'[i % 2]}/{i:02}.jpg" for i in range(NUM)} - set(bad)
    assert set(found) == good
    lines = lines_of(quarantine)
    assert {line["key"] for line in lines} == set(bad)
    if policy == "skip":
        assert sorted(found) == sorted(good)
        assert len(lines) == len(bad)


# ----------------------------------------------------------------------------------------------- bounds, quarantine


@pytest.mark.parametrize("executor", THREADS)
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_max_bad_samples(policy: str, executor: str, folder: Path, tmp_path: Path) -> None:
    damaged(folder, BAD)
    quarantine = tmp_path / "bad.jsonl"
    made = files(folder, executor, on_bad_sample=policy, max_bad_samples=len(BAD))
    with loaderkit.build(made) as loader:
        for _ in range(3):  # counted anew in every epoch
            list(loader)
    made = files(folder, executor, on_bad_sample=policy, max_bad_samples=len(BAD) - 1, quarantine=str(quarantine))
    loader = loaderkit.build(made)
    with pytest.raises(TooManyBadSamplesError, match=r"max_bad_samples = 5") as caught:
        list(loader)
    assert caught.value.key is not None
    assert caught.value.key in str(caught.value)
    assert caught.value.stage == "decode"
    assert isinstance(caught.value.__cause__, StageError)
    assert threads_of_ours() == []
    assert len(lines_of(quarantine)) == len(BAD)
    loader.close()


def test_no_bad_sample_may_be_allowed(folder: Path) -> None:
    with loaderkit.build(files(folder, on_bad_sample="skip", max_bad_samples=0)) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == NUM
    damaged(folder, [3])
    with pytest.raises(TooManyBadSamplesError):
        list(loaderkit.build(files(folder, on_bad_sample="skip", max_bad_samples=0)))


def test_what_was_read_ahead_is_not_counted(folder: Path, tmp_path: Path) -> None:
    """Only delivered batches count: the quarantine file is the same however far was read ahead."""
    damaged(folder, [1, 3, 5])  # batch 2 of the canonical order
    quarantine = tmp_path / "bad.jsonl"
    made = files(folder, on_bad_sample="skip", quarantine=str(quarantine)).prefetch(batches=16)
    with loaderkit.build(made) as loader:
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
            assert lines_of(quarantine) == []
        next(iterator)
        assert len(lines_of(quarantine)) == 3


def test_with_raise_the_bad_sample_is_written_down_too(folder: Path, tmp_path: Path) -> None:
    (key,) = damaged(folder, [3])
    quarantine = tmp_path / "bad.jsonl"
    loader = loaderkit.build(files(folder, quarantine=str(quarantine)))
    failure(loader)
    assert [line["key"] for line in lines_of(quarantine)] == [key]
    loader.close()


def test_quarantine_lines_are_added(folder: Path, tmp_path: Path) -> None:
    damaged(folder, [3])
    quarantine = tmp_path / "bad.jsonl"
    quarantine.write_text('{"key": "earlier"}\n')
    made = files(folder, on_bad_sample="skip", quarantine=str(quarantine))
    with loaderkit.build(made) as loader:
        list(loader)
    assert [line["key"] for line in lines_of(quarantine)] == ["earlier", "b/03.jpg"]


@pytest.mark.parametrize("place", ["directory", "absent folder", "a file as folder"])
def test_a_quarantine_that_cannot_be_written(place: str, folder: Path, tmp_path: Path) -> None:
    path = {
        "directory": tmp_path,
        "absent folder": tmp_path / "absent" / "bad.jsonl",
        "a file as folder": folder / "a" / "00.jpg" / "bad.jsonl",
    }[place]
    with pytest.raises(ConfigError, match=r"errors\.quarantine.*cannot be written") as caught:
        loaderkit.build(files(folder, on_bad_sample="skip", quarantine=str(path)))
    assert str(path) in str(caught.value)


def test_keys_that_are_no_utf8(tmp_path: Path) -> None:
    """File names are bytes: one that is no UTF-8 must be reported and written down like any other."""
    root = tmp_path / "data"
    root.mkdir()
    for index in range(8):
        (root / f"{index}.jpg").write_bytes(picture(index))
    with open(os.fsencode(root) + b"/bad-\xff.jpg", "wb") as file:
        file.write(b"no picture")
    quarantine = tmp_path / "bad.jsonl"
    made = Pipeline.files(root).shuffle("none").read().decode().batch(3)
    error = failure(loaderkit.build(made))
    assert error.key == "bad-\udcff.jpg"
    assert "bad-\\udcff.jpg" in str(error)
    assert str(error).encode()
    with loaderkit.build(made.errors(on_bad_sample="skip", quarantine=str(quarantine))) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == 8
    (line,) = lines_of(quarantine)
    assert line["key"] == "bad-\udcff.jpg"


# ------------------------------------------------------------------------------------------------------------- again


@pytest.mark.parametrize("executor", THREADS)
def test_many_failures_leave_nothing(executor: str, folder: Path) -> None:
    damaged(folder, [4])
    for _ in range(20):
        failure(loaderkit.build(files(folder, executor)))
    loader = loaderkit.build(files(folder, executor))
    for _ in range(10):
        with pytest.raises(StageError):
            list(loader)
        assert threads_of_ours() == []
        loader.set_epoch(0)


def test_a_quarantine_on_a_full_disk(tmp_path: Path) -> None:
    """A bad sample that cannot be written down is not passed over in silence, and nothing is left running."""
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    Pillow.new("RGB", (8, 8)).save(tmp_path / "good.jpg")
    pipeline = loaderkit.Pipeline.files(tmp_path, include="*.jpg").read().decode().batch(2)
    loader = loaderkit.build(pipeline.errors(on_bad_sample="skip", quarantine="/dev/full"))
    with pytest.raises(
        loaderkit.errors.ConnectorError, match=r"/dev/full cannot be written \(No space left.*'bad.jpg'"
    ):
        next(iter(loader))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loaderkit")]
    loader.close()
