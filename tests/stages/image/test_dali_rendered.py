"""What DALI has rendered costs no second look by the CPU's decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import make_photo
from dali_pipelines import chunk_of, renderer

from loaderkit.samples.values import Encoded, GpuDecoded


class TestRenderedSamples:
    @pytest.mark.parametrize(
        ("other", "num_looks"), [(3, 0), ("text", 0), (Encoded(memoryview(b"7"), "cls"), 1), (None, 1)]
    )
    def test_the_cpu_is_asked_about_what_is_left(self, other: Any, num_looks: int) -> None:
        decoded: list[int] = []
        chunk = chunk_of([make_photo(1)])
        (sample,) = chunk.samples
        assert sample is not None
        sample["other"] = other
        renderer(1, decoded)(chunk)
        assert type(sample["image"]) is GpuDecoded
        assert len(decoded) == num_looks

    @pytest.mark.parametrize(
        ("change", "num_looks"),
        [(lambda sample: sample.update(other=None), 0), (lambda sample: sample.pop("depth"), 1)],
        ids=["others stay", "one is missing"],
    )
    def test_or_about_the_fields_that_are_named(self, change: Callable[[Any], Any], num_looks: int) -> None:
        decoded: list[int] = []
        chunk = chunk_of([make_photo(1)])
        (sample,) = chunk.samples
        assert sample is not None
        sample["depth"] = Encoded(memoryview(make_photo(2)), "jpg")
        change(sample)
        renderer(1, decoded, fields=("image", "depth"))(chunk)
        assert len(decoded) == num_looks
