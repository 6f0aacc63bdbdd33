"""Reports on loops from which hardly anything came: an error before the first batch, or a few batches only."""

from __future__ import annotations

import random

import numpy as np
import pytest
from made_accounts import row, stats

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError
from loaderkit.profile.render.terminal import to_text


class Large:
    """Arrays of 256 KiB."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"x": np.zeros(2**16, np.float32)}


def test_the_error_is_the_verdict(rng: random.Random) -> None:
    pipeline = Pipeline.dataset(Large()).read().batch(rng.randrange(8, 16)).prefetch(memory="1MiB", executor="thread")
    with loaderkit.build(pipeline) as loader, pytest.raises(ConfigError) as caught, loader.profile() as profile:
        next(iter(loader))
    report = profile.result
    assert report.verdict.kind == "failed"
    assert str(caught.value) in report.verdict.evidence
    text = to_text(report, width=1000)
    assert "prefetch.memory" in text.splitlines()[2]
    assert "Nothing to say yet" not in text


def test_a_few_batches_are_too_few(rng: random.Random) -> None:
    """Whether the first wait comes once or with every batch is not known before there are eight."""
    for _ in range(50):
        num, first_s, each_s = rng.randrange(1, 16), rng.uniform(3, 6), rng.uniform(0.1, 0.4)
        seen = stats({"start": first_s, "read": each_s * num}, [row("read", 9, 0.5)], wall_s=12.0, batches=num)
        found = seen.verdict()
        if first_s < each_s * num:
            assert found.stage == "read"
        elif num < 8:
            assert (found.stage, found.kind) == ("start", "unknown")
            assert "--steps 30" in found.change
            assert "Too few batches" in found.headline
        else:
            assert (found.stage, found.kind) == ("start", "start")
