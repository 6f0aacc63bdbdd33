"""Settings of a CheckpointManager: every mistake is named with file, line and key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loaderkit.checkpoint.manager.settings import (
    BestArgs,
    Every,
    KeepArgs,
    LocalArgs,
    UploadArgs,
    save_settings,
)
from loaderkit.errors import ConfigError

WHOLE = """
to: runs/a
local: {path: fast, keep: 2, upload: {bandwidth: 1GB/s}}
every: 500
keep: {last: 3, every: 5000, for: 30d, best: {metric: loss, mode: min, num: 2}}
when_busy: skip
notice: {signals: [SIGTERM, SIGUSR1]}
"""


def test_a_file_has_everything(write: Callable[[str], Path]) -> None:
    path = write(WHOLE)
    settings = save_settings(path)
    assert settings.to == str(path.parent / "runs/a")
    assert settings.every == Every(steps=500)
    assert settings.local == LocalArgs(
        path=str(path.parent / "fast"), keep=KeepArgs(last=2), upload=UploadArgs(bandwidth=10**9)
    )
    best = BestArgs(metric="loss", mode="min", num=2)
    assert settings.keep == KeepArgs(last=3, every=5000, **{"for": 30 * 86400.0}, best=best)
    assert settings.when_busy == "skip"
    assert settings.notice is not None
    assert settings.notice.signals == ("SIGTERM", "SIGUSR1")


def test_a_url_a_mapping_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN", "b")
    assert save_settings("runs/a").to == str(tmp_path / "runs/a")
    assert save_settings("s3://bucket/runs/a").to == "s3://bucket/runs/a"
    assert save_settings({"to": "s3://bucket/${RUN}"}).to == "s3://bucket/${RUN}"  # only files have variables
    (tmp_path / "checkpoint.yaml").write_text("to: s3://bucket/${RUN}\nevery: 10min\n")
    settings = save_settings("checkpoint.yaml", every=7)
    assert (settings.to, settings.every) == ("s3://bucket/b", Every(steps=7))


def test_local_is_a_path_or_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = save_settings("s3://b/a", local="fast").local
    assert plain == LocalArgs(path=str(tmp_path / "fast"), keep=KeepArgs(last=1), upload=UploadArgs(bandwidth=None))
    assert save_settings("s3://b/a", local=tmp_path / "fast").local == plain
    assert save_settings({"to": "s3://b/a", "local": {"path": tmp_path / "fast"}}).local == plain
    rules = save_settings("s3://b/a", local={"path": "/f", "keep": {"last": 2, "every": 10}}).local
    assert rules is not None
    assert rules.keep == KeepArgs(last=2, every=10)
    with pytest.raises(ConfigError, match=r"local.path: '/a' is `to` as well"):
        save_settings("/a", local="/a/")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1GB/s", 10**9), ("512MiB/s", 2**29), ("100MB", 10**8), (12345, 12345), (None, None)],
)
def test_bandwidth(value: Any, expected: int | None) -> None:
    settings = save_settings("s3://b/a", local={"path": "/f", "upload": {"bandwidth": value}})
    assert settings.local is not None
    assert settings.local.upload.bandwidth == expected
    again = save_settings(settings.model_dump(mode="json", by_alias=True))
    assert again == settings


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, Every(steps=1)), ("500", Every(steps=500)), ("500 steps", Every(steps=500)), ("10min", Every(seconds=600.0)),
     ("1.5h", Every(seconds=5400.0)), ("auto", Every(is_auto=True)), (None, None)],
)  # fmt: skip
def test_every(value: Any, expected: Every | None) -> None:
    assert save_settings({"to": "/a", "every": value}).every == expected


@pytest.mark.parametrize(
    ("text", "key", "line", "said"),
    [
        ("every: 500\n", "", None, "'to' is missing: the directory of the checkpoints"),
        ("to: /a\nevry: 500\n", "evry", 2, "unknown key 'evry'; did you mean 'every'?"),
        ("to: /a\nevery: 0\n", "every", 2, "a number of steps such as 500, or a duration with its unit"),
        ("to: /a\nevery: soon\n", "every", 2, "not 'soon'"),
        ("to: /a\nevery: 1.5\n", "every", 2, "not 1.5"),
        ("to: /a\nkeep:\n  last: 0\n", "keep.last", 3, "greater than or equal to 1, not 0"),
        ("to: /a\nkeep:\n  fro: 3d\n", "keep.fro", 3, "unknown key 'fro'; did you mean 'for'?"),
        ("to: /a\nkeep: {for: 3d}\n", "keep", 2, "`for` says how long those of `every` are kept: give `every`, too"),
        ("to: /a\nkeep: {best: {mode: min}}\n", "keep.best", 2, "'metric' is missing"),
        (
            "to: /a\nkeep: {best: {metric: loss, mode: low}}\n",
            "keep.best.mode",
            2,
            "expected 'min' or 'max', not 'low'",
        ),
        ("to: /a\nlocal: {keep: 2}\n", "local", 2, "'path' is missing"),
        ("to: /a\nlocal: {path: /b, keep: 0}\n", "local.keep", 2, "greater than or equal to 1, not 0"),
        (
            "to: /a\nlocal:\n  path: /b\n  upload: {bandwith: 1GB/s}\n",
            "local.upload.bandwith",
            4,
            "did you mean 'bandwidth'",
        ),
        (
            "to: /a\nlocal: {path: /b, upload: {bandwidth: fast}}\n",
            "local.upload.bandwidth",
            2,
            "a speed such as 500MB/s",
        ),
        ("to: /a\nlocal: {path: /b, upload: {bandwidth: 0}}\n", "local.upload.bandwidth", 2, "greater than 0"),
        ("to: /a\nwhen_busy: wiat\n", "when_busy", 2, "did you mean 'wait'?"),
        ("to: /a\nnotice: {signals: [SIGTREM]}\n", "notice.signals.0", 2, "the name of a signal such as SIGTERM"),
        ("to: /a\nnotice: {signals: [SIGKILL]}\n", "notice.signals.0", 2, "a signal that a program can catch"),
        ("to: /a\nnotice: {signals: []}\n", "notice", 2, "nothing announces the end: give `signals`, `files`"),
        ("to: /a\nnotice: {until: JOB_END}\n", "notice", 2, "`within` says how long before that it is to stop"),
        (
            "to: /a\nnotice: {until: 3600, within: 30s}\n",
            "notice.until",
            2,
            "3600 was in 1970, so the job would stop after",
        ),
        ("to: /a\nnotice: {until: -5, within: 30s}\n", "notice.until", 2, "an environment variable such as SLURM_JOB"),
        ("to: /a\nnotice: {urls: [/run/x]}\n", "notice.urls.0", 2, "a URL of http or https, not '/run/x'"),
        ("to: /a\nmtbf: 6h\n", "", None, "`mtbf` tells `every: auto` how often to save: set that, too"),
        ("- to\n", "", None, "a mapping with at least `to`, this is list"),
        ("", "", None, "this is nothing"),
    ],
)
def test_what_is_wrong_is_named(write: Callable[[str], Path], text: str, key: str, line: int | None, said: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        save_settings(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    (problem,) = caught.value.problems
    assert (problem.where, problem.line) == (key, line)


def test_all_that_announces_the_end(write: Callable[[str], Path]) -> None:
    notice = "{signals: [SIGTERM], within: 30s, files: [/run/preempt], urls: ['http://x/y'], until: SLURM_JOB_END_TIME}"
    settings = save_settings(write(f"to: /a\nevery: auto\nmtbf: 6h\nnotice: {notice}\n"))
    assert settings.mtbf == 21600.0
    assert settings.notice is not None
    assert (settings.notice.within, settings.notice.until) == (30.0, "SLURM_JOB_END_TIME")
    assert (settings.notice.files, settings.notice.urls) == (("/run/preempt",), ("http://x/y",))
    assert save_settings(settings.model_dump(mode="json", by_alias=True)) == settings
    assert save_settings("/a", notice={"until": 1.8e9, "within": 5}).notice is not None


def test_arguments_are_named_too() -> None:
    with pytest.raises(ConfigError, match=r"CheckpointManager: every: expected a number of steps"):
        save_settings("/a", every="soon")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        save_settings("/nowhere/checkpoint.yaml")
