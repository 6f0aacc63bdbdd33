"""Stragglers by name, and what they have in common, on drawn folders of files."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from made_accounts import row, services, stats

from loaderkit import Pipeline
from loaderkit.engine.metrics.slow_samples import Slow
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.profile.slow_samples import say_stragglers
from loaderkit.sources.base import Source


def opened(folder: Path) -> Source:
    pipeline = Pipeline.files(str(folder), include="**/*").read().batch(4)
    return compile_pipeline(to_config(pipeline, {}), rank=0, world_size=1).source


def said(source: Source, slow: list[int], rng: random.Random) -> str:
    """What is said where these samples take long; some ordinary ones are kept, too, and one chunk of several."""
    kept = [Slow(t := rng.uniform(1.0, 2.0), t, t, 0, index, 1) for index in slow]
    kept += [Slow(0.011, 0.0, 0.011, 0, index, 1) for index in rng.sample(range(len(source)), 5)]
    kept.append(Slow(0.9, 0.0, 1.8, 0, 0, 2))
    one = row("read", 19, 18, num_items=len(source), services=services((0.01, len(source)), (1.5, len(slow))))
    seen = stats({"read": 8.0}, [one], slow={"read": tuple(kept)})
    return say_stragglers(seen, "read", source)


@pytest.mark.parametrize("trait", ["folder", "extension", "bytes", "nothing"])
def test_what_stragglers_have_in_common(trait: str, tmp_path: Path, rng: random.Random) -> None:
    num, num_slow = rng.randrange(60, 400), rng.randrange(3, 9)
    chosen = rng.sample(range(num), num_slow)
    for index in range(num):
        is_slow = index in chosen
        folder = "abcd"[chosen.index(index) % 4 if is_slow else rng.randrange(4)]  # no folder by chance
        extension, size = "jpg", rng.randrange(200, 300)
        if is_slow and trait == "folder":
            folder = "odd"
        elif is_slow and trait == "extension":
            extension = "png"
        elif is_slow and trait == "bytes":
            size *= rng.randrange(8, 20)
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{index:04}.{extension}").write_bytes(bytes(size))
    source = opened(tmp_path)
    slow = [place for place in range(num) if int(source.key(place).split("/")[-1][:4]) in chosen]
    found = said(source, slow, rng)
    named = found.split(": ")[0].split("the slowest are ")[1].split(", ")
    assert len(named) == 3
    assert {one.split(" (")[0] for one in named} <= {source.key(place) for place in slow}
    signs = {"folder": "lie in odd/", "extension": "are .png", "bytes": "times as much as usual"}
    assert [name for name, sign in signs.items() if sign in found] == [name for name in signs if name == trait]


def test_few_have_nothing_in_common(tmp_path: Path, rng: random.Random) -> None:
    for name in ("a/1.jpg", "a/2.jpg", "b/3.jpg", "b/4.jpg", "b/5.jpg", "b/6.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0" * 10)
    source = opened(tmp_path)
    found = said(source, [0, 1], rng)
    assert "a/1" in found
    assert ":" not in found
    nobody = stats({"read": 8.0}, [replace(row("read", 19, 18), services=services((0.01, 9)))])
    assert say_stragglers(nobody, "read", source) == ""
