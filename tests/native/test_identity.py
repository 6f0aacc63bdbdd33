"""Another loaderkit, or one with other C modules, is refused where batches are made."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
from numbers_dataset import build, numbers

from loaderkit.engine.process import worker_process
from loaderkit.errors import ConfigError
from loaderkit.native.identity import check_same, identity
from loaderkit.shards import job as shard_job


def test_the_same_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    ours = identity()
    check_same(ours)
    check_same(ours._replace(folder="/elsewhere/loaderkit"))
    with caplog.at_level(logging.WARNING):
        check_same(ours, ours._replace(resamples=not ours.resamples))
    assert "AVX2" in caplog.text


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ({"digest": "0" * 32, "folder": "/there"}, {}, "another than .* in /there, which the program has"),
        ({"modules": ("_jpeg",)}, {"modules": ()}, "to be made, lacks the C modules _jpeg"),
        ({"modules": ()}, {"modules": ("_jpeg",)}, "which the program has, lacks the C modules _jpeg"),
    ],
)
def test_others_are_named(there: dict[str, Any], here: dict[str, Any], said: str) -> None:
    ours = identity()
    with pytest.raises(ConfigError, match=said):
        check_same(ours._replace(**there), ours._replace(**here))


def test_a_worker_process_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    other = identity()._replace(digest="0" * 32, folder="/there")
    monkeypatch.setattr(worker_process, "identity", lambda: other)
    with pytest.raises(ConfigError, match=r"another than .* in /there"), build(numbers()) as loader:
        next(iter(loader))


def test_so_does_what_packs_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    other = identity()._replace(modules=("_of_a_later_release",))
    monkeypatch.setattr(shard_job, "identity", lambda: other)
    packed = pickle.dumps((tuple(other), b""))
    with pytest.raises(ConfigError, match="_of_a_later_release"):
        shard_job.unpack_job(packed)
