"""Fields of unequal length: each padded by its own value, at either side, to a multiple, with masks; equal to a plain loop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from token_files import write_megatron

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, StageError


def samples_of(rng: random.Random, num: int, most: int = 20) -> list[dict[str, Any]]:
    """Tokens and labels of one length, and another field of another."""
    made = []
    for number in range(num):
        size = rng.randint(0, most)
        made.append({
            "input_ids": np.array([rng.randrange(1, 99) for _ in range(size)], np.int64),
            "labels": torch.tensor([rng.choice([-100, 5]) for _ in range(size)], dtype=torch.int64),
            "boxes": np.array([[rng.random()] * 4 for _ in range(rng.randint(0, 3))], np.float32).reshape(-1, 4),
            "number": number,
        })  # fmt: skip
    return made


def padded(rows: Sequence[Any], value: float, side: str, multiple: int) -> torch.Tensor:
    tensors = [torch.as_tensor(row) for row in rows]
    length = -(-max(map(len, tensors)) // multiple) * multiple
    made = torch.full((len(rows), length, *tensors[0].shape[1:]), value, dtype=tensors[0].dtype)
    for row, tensor in zip(made, tensors, strict=True):
        for place in range(len(tensor)):
            row[length - len(tensor) + place if side == "left" else place] = tensor[place]
    return made


def batches_of(samples: list[dict[str, Any]], **batch: Any) -> list[dict[str, Any]]:
    with loaderkit.build(Pipeline.dataset(samples).shuffle(seed=3).epochs(1).read().batch(**batch)) as loader:
        return list(loader)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("multiple", [None, 1, 8])
def test_padding_of_a_plain_loop(rng: random.Random, side: str, multiple: int | None) -> None:
    samples = samples_of(rng, 50)
    values = {"input_ids": 7, "labels": -100, "boxes": -1}
    for batch in batches_of(
        samples,
        size=4,
        pad_value=values,
        padding_side=side,
        pad_to_multiple_of=multiple,
        attention_mask={"attention_mask": "input_ids", "box_mask": "boxes"},
    ):
        own = [samples[number] for number in batch["number"].tolist()]
        for name, value in values.items():
            assert torch.equal(batch[name], padded([one[name] for one in own], value, side, multiple or 1))
        for mask, name in ("attention_mask", "input_ids"), ("box_mask", "boxes"):
            ones = [torch.ones(len(one[name]), dtype=torch.int64) for one in own]
            assert torch.equal(batch[mask], padded(ones, 0, side, multiple or 1))
        assert batch["input_ids_sizes"].tolist() == [len(one["input_ids"]) for one in own]


def test_one_mask_for_fields_of_one_length(rng: random.Random) -> None:
    samples = [{name: sample[name] for name in ("input_ids", "labels")} for sample in samples_of(rng, 9)]
    for batch in batches_of(
        samples, size=4, pad_value={"labels": -100}, ragged={"input_ids": "pad"}, attention_mask="mask"
    ):
        assert batch["mask"].sum(1).tolist() == batch["labels_sizes"].tolist()
        assert (batch["input_ids"][batch["mask"] == 0] == 0).all()


@pytest.mark.parametrize("window", [0, 50])
def test_batches_of_tokens_count_what_is_padded_on(
    rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """To a multiple of 16, no batch has more than 200 tokens, and each document comes once, at 1 and 3 ranks."""
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    documents = [np.full(rng.randint(1, 90), number) for number in range(150)]
    path = write_megatron(tmp_path / "x", documents, "int32")
    batch: dict[str, Any] = {
        "tokens": 200,
        "window": window,
        "pad_value": {"tokens": -1},
        "pad_to_multiple_of": 16,
        "attention_mask": "mask",
    }
    pipeline = Pipeline.tokens(path).shuffle(seed=1).epochs(1).read().batch(**batch)
    for world_size in (1, 3):
        seen: list[int] = []
        for rank in range(world_size):
            with loaderkit.build(pipeline, rank=rank, world_size=world_size) as loader:
                for one in loader:
                    assert one["tokens"].shape[1] % 16 == 0
                    assert one["tokens"].numel() <= 200
                    seen += one["tokens"].gather(1, one["mask"].argmax(1, keepdim=True)).flatten().tolist()
                    assert torch.equal(one["tokens"] >= 0, one["mask"] == 1)
        assert sorted(seen) == list(range(150))
    with pytest.raises(ConfigError, match=r"allow at least 96"):
        longest = [*documents, np.zeros(95)]
        write_megatron(tmp_path / "y", longest, "int32")
        loaderkit.build(Pipeline.tokens(tmp_path / "y.bin").read().batch(**{**batch, "tokens": 95}))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"padding_side": "left"}, "`padding_side` is for fields that are padded"),
        ({"attention_mask": "m"}, "`attention_mask` is for fields"),
        ({"pad_value": {"x": 0}, "attention_mask": {"m": "y"}}, "names 'y', which is not padded"),
        ({"pad_value": {"x": 0}, "ragged": {"x": "list"}}, "`pad_value` pads 'x', and `ragged` makes a list"),
    ],
)
def test_settings_that_do_not_go_together(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaderkit.build(Pipeline.dataset([{"x": torch.ones(2)}]).read().batch(1, **batch))


def test_what_does_not_fit_the_samples() -> None:
    one = [{"x": torch.ones(2), "y": torch.ones(3), "n": 1}]
    both = {"x": 0, "y": 0}
    with pytest.raises(StageError, match=r"'x' and 'y' differ in length.*attention_mask: \{m: x\}"):
        batches_of(one, size=1, pad_value=both, attention_mask="m")
    with pytest.raises(StageError, match="'n' is a single number"):
        batches_of(one, size=1, pad_value={**both, "n": 0}, attention_mask={"m": "n"})
    with pytest.raises(ConfigError, match="'y' is a field already"):
        batches_of(one, size=1, pad_value=both, attention_mask={"y": "x"})
    with pytest.raises(ConfigError, match=r"pad_value is 0.5, which 'n' cannot hold"):
        batches_of(one, size=1, pad_value={**both, "n": 0.5})


def test_output_may_name_a_mask() -> None:
    pipeline = Pipeline.dataset([{"x": torch.ones(2)}]).read().batch(1, pad_value={"x": 0}, attention_mask="m")
    with loaderkit.build(pipeline.output("x", "m")) as loader:
        x, mask = next(iter(loader))
    assert (x.tolist(), mask.tolist()) == ([[1, 1]], [[1, 1]])
