"""What every stage promises, for each of those that act on single samples, and for user code."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from loaderkit.testing import StageContract
from loaderkit.testing.runs import EXECUTORS, assert_same, epochs_of

IMAGE_STAGES: dict[str, dict[str, Any]] = {
    "resize": {"size": [8, 12]},
    "center_crop": {"size": [8, 8]},
    "random_crop": {"size": [8, 8]},
    "random_resized_crop": {"size": 8},
    "random_horizontal_flip": {},
    "random_vertical_flip": {},
    "random_rotation": {"degrees": 30},
    "color_jitter": {"brightness": 0.4, "hue": 0.1},
    "random_grayscale": {"p": 0.5},
    "gaussian_blur": {"kernel_size": 3},
    "random_erasing": {"p": 0.7},
}


def brighten(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"image": sample["image"] // 2, "drawn": float(rng.random())}


STAGES = [{name: arguments} for name, arguments in IMAGE_STAGES.items()]
STAGES.append({"call": {"function": f"{__name__}:brighten"}})


def darken(sample: dict[str, Any], number: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"image": sample["image"] // (1 + number), "number": number, "drawn": float(rng.random())}


EXPAND = {"expand": {"function": f"{__name__}:darken", "num": 4}}


class TestExpand(StageContract):
    """Its samples share their keys."""

    stage = EXPAND

    @pytest.fixture
    def samples(self, rng: random.Random) -> Sequence[Mapping[str, Any]]:
        numbers = np.random.default_rng(rng.randrange(2**32))
        return [{"image": numbers.integers(0, 256, (16, 20, 3), np.uint8), "label": n} for n in range(8)]

    def test_a_sample_does_not_depend_on_its_neighbours(self, pipeline: dict[str, Any]) -> None:
        rows: list[dict[Any, Any]] = []
        for size in (1, 2, 3, 4, 5):
            pipeline["stages"][-1] = {"batch": {"size": size}}
            rows.append({})
            for batch in epochs_of(pipeline, EXECUTORS[0]):
                for row, name in enumerate(zip(batch["__key__"], batch["number"].tolist(), strict=True)):
                    rows[-1][name] = {field: values[row : row + 1] for field, values in batch.items()}
            assert len(rows[-1]) == 32
            assert_same([*rows[-1].values()], [*rows[0].values()], f"in batches of {size}")

    def test_the_same_behind_decode(self, pipeline: dict[str, Any]) -> None:
        pytest.skip("user code gets the arrays of a data set as they are, and of decoded pictures [C, H, W]")


class TestStages(StageContract):
    @pytest.fixture(params=STAGES, ids=lambda stage: next(iter(stage)), autouse=True)
    def chosen(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "stage", request.param, raising=False)

    @pytest.mark.matrix(4)
    def test_worker_processes_give_the_same(self, pipeline: dict[str, Any]) -> None:
        super().test_worker_processes_give_the_same(pipeline)

    @pytest.fixture
    def samples(self, rng: random.Random) -> Sequence[Mapping[str, Any]]:
        numbers = np.random.default_rng(rng.randrange(2**32))
        return [{"image": numbers.integers(0, 256, (16, 20, 3), np.uint8), "label": n} for n in range(8)]
