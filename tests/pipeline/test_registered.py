"""`loaderkit.extend.register`: what a program registers is known at once, and in worker processes; what it may not take."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extensions import forget_after
from pydantic import Field

import loaderkit
from loaderkit import CheckpointManager, Pipeline
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError
from loaderkit.extend import SourceArgs, SourceKind, StageArgs, StageKind, StoreArgs, register
from loaderkit.pipeline.config.parsing import parse
from loaderkit.pipeline.executors.sendable import check_sendable


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_after(monkeypatch)


class TimesArgs(StageArgs):
    """Multiply."""

    by: int = Field(2, description="the factor")


def times(args: TimesArgs) -> Callable[..., None]:
    def run(sample: dict[str, Any], draws: Any, scratch: Any = None) -> None:
        sample["x"] *= args.by

    return run


TIMES = StageKind(TimesArgs, "sample", make=times)


def closure_kind(held: Any) -> StageKind:
    """A kind of the same arguments whose function cannot be found by its name."""

    def make(args: TimesArgs) -> Callable[..., None]:
        def run(sample: dict[str, Any], draws: Any, scratch: Any = None) -> None:
            sample["x"] = sample["x"] * args.by + (held if isinstance(held, int) else 0)

        return run

    return StageKind(TimesArgs, "sample", make=make)


def values(executor: str, stage: Any = "times") -> list[int]:
    stages = ["read", stage, {"batch": {"size": 2}}]
    described = {
        "source": {"kind": "dataset", "object": [{"x": number} for number in range(6)]},
        "order": {"shuffle": "none", "epochs": 1},
        "stages": stages,
        "prefetch": {"executor": executor},
    }
    with loaderkit.build(described) as loader:
        return [x for batch in loader for x in batch["x"].tolist()]


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
@pytest.mark.parametrize("by_value", [False, True])
def test_every_executor_knows_it(executor: str, by_value: bool) -> None:
    register("times", closure_kind(1) if by_value else TIMES)
    assert values(executor, {"times": {"by": 3}}) == [3 * number + by_value for number in range(6)]


def test_a_kind_that_cannot_be_sent_is_refused_by_name() -> None:
    register("times", closure_kind(threading.Lock()))
    assert values("thread") == [0, 2, 4, 6, 8, 10]
    with pytest.raises(ConfigError, match=r"loaderkit\.extend\.register\('times'\).* cannot be sent"):
        values("process")


class HoldsArgs(StageArgs):
    """Hold an object."""

    held: Any = Field(None, description="any object")


class HeldArgs(SourceArgs):
    """Hold an object."""

    held: Any = Field(None, description="any object")


def test_arguments_that_cannot_be_sent_are_named() -> None:
    register("holds", StageKind(HoldsArgs, "sample", make=lambda args: lambda sample, draws, scratch=None: None))
    with pytest.raises(ConfigError, match=r"^stages\.second\.held: <unlocked .* cannot be sent to the process"):
        values("process", {"holds": {"name": "second", "held": threading.Lock()}})
    register("held", SourceKind(HeldArgs, lambda args, connector: None))  # type: ignore[arg-type, return-value]
    source = {"kind": "held", "held": [threading.Lock()]}
    config = parse({"source": source, "stages": ["read", {"batch": {"size": 2}}], "prefetch": {"executor": "process"}})
    with pytest.raises(ConfigError, match=r"^source\.held: \[<unlocked .* cannot be sent to the process"):
        check_sendable(config)


def test_names_that_are_taken() -> None:
    with pytest.raises(ConfigError, match="the stage 'resize' is claimed by loaderkit itself and by this program"):
        register("resize", TIMES)
    with pytest.raises(ConfigError, match=r"Pipeline\.shuffle is something else"):
        register("shuffle", TIMES)
    for name in ("prefetch", "errors", "ranks", "metrics", "mix", "config", "output"):
        with pytest.raises(ConfigError, match=rf"Pipeline\.{name} is something else"):
            register(name, TIMES)
    for name in ("two words", "a-b", "_x", "1st"):
        with pytest.raises(ConfigError, match="letters, digits and _"):
            register(name, TIMES)
    register("times", TIMES)
    register("times", closure_kind(5))  # of the same arguments: a cell that ran again
    assert values("inline") == [5, 7, 9, 11, 13, 15]

    class OtherArgs(StageArgs):
        """Others."""

    with pytest.raises(ConfigError, match=r"'times' is claimed by .*TimesArgs\) and by .*OtherArgs\)"):
        register("times", StageKind(OtherArgs, "sample", make=times))


@pytest.mark.parametrize("item", [7, None, TimesArgs, "m:f"])
def test_anything_else_is_no_extension(item: Any) -> None:
    with pytest.raises(ConfigError, match="is no SourceKind, no StageKind"):
        register("times", item)


class OfPath(FileConnector):
    """A connector as one is given to `build`: it takes no settings."""

    def __init__(self, path: str) -> None:
        super().__init__(path)


def of_url(url: str) -> FileConnector:
    return FileConnector(url)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (OfPath, r"'disk' \(test_registered:OfPath\) is the class OfPath\(path\), and has to be"),
        (of_url, r"'disk' \(test_registered:of_url\) is the function of_url\(url\), and has to be"),
        (lambda url, settings, other: None, r"is the function <lambda>\(url, settings, other\), and has to be"),
        (lambda url, *, settings=None: None, r"is the function <lambda>\(url, \*, settings=None\), and has to be"),
        (lambda url, settings, *, other: None, r"is the function <lambda>\(url, settings, \*, other\), and has to be"),
    ],
)
def test_what_takes_no_url_and_settings_makes_no_connector(item: Any, said: str) -> None:
    with pytest.raises(
        ConfigError, match=said + r" .*called with \(url, settings\).*def __init__\(self, url, settings=None\)"
    ):
        register("disk", item)


def test_what_takes_more_may_make_a_connector(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    makers: list[Any] = [
        lambda *given: FileConnector(given[0].partition("://")[2]),
        wraps(of_url)(lambda url, settings: of_url(url.partition("://")[2])),
        partial(lambda root, url, settings=None, more=1: FileConnector(root), str(tmp_path)),
    ]
    for number, make in enumerate(makers):
        register(f"disk{number}", make)
        with loaderkit.build(Pipeline.files(f"disk{number}://{tmp_path}", include="*.txt").read().batch(1)) as loader:
            assert next(iter(loader))["txt"] == [b"text"]


def open_folder(url: str, settings: StoreArgs) -> FileConnector:
    return FileConnector(url.partition("://")[2])


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_scheme_is_for_sources_and_for_checkpoints(flush: Any, tmp_path: Path) -> None:
    register("folder", open_folder)
    (tmp_path / "data").mkdir()
    for number in range(4):
        (tmp_path / "data" / f"{number}.txt").write_text(f"text {number}")
    pipeline = Pipeline.files(f"folder://{tmp_path}/data", include="*.txt").shuffle(False).epochs(1).read().batch(2)
    for executor in ("thread", "process"):
        with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
            assert [text for batch in loader for text in batch["txt"]] == [f"text {n}".encode() for n in range(4)]
    state = {"weight": torch.arange(6.0)}
    with CheckpointManager(f"folder://{tmp_path}/run", flush=flush) as checkpoints:
        checkpoints.save(1, state, force=True, wait=True)
    assert torch.equal(loaderkit.restore(f"folder://{tmp_path}/run/step-0000000001")["weight"], state["weight"])


@pytest.mark.parametrize("name", ["Caps", "under_score", "two words", "1st", "fsspec+zip", "a:b", "-a", ""])
def test_a_scheme_that_no_url_has_is_refused(name: str, rng: random.Random) -> None:
    with pytest.raises(ConfigError, match=r"no URL has this scheme"):
        register(name, open_folder)
    known = "".join(rng.choice("abcxyz019+.-") for _ in range(5))
    register(f"z{known}", open_folder)


def test_a_connector_given_to_build_goes_before(tmp_path: Path) -> None:
    def never(url: str, settings: StoreArgs) -> FileConnector:
        raise AssertionError("it is not asked")

    register("folder", never)
    given = MemoryConnector({"a.txt": b"given"})
    with loaderkit.build(
        Pipeline.files("folder://", include="*.txt").read().batch(1), connectors={"folder": given}
    ) as loader:
        assert next(iter(loader))["txt"] == [b"given"]


def test_two_stores_share_a_cache(tmp_path: Path, rng: random.Random) -> None:
    """Their objects have the same keys, sizes and etags, and the same names in messages. Arrays have one sample: what is kept
    are ranges as they were read, of as many samples as were read together."""

    class Terse(FileConnector):
        def stat(self, key: str) -> Any:
            return super().stat(key)._replace(etag="v1")

        def list(self, prefix: str) -> Any:
            return (info._replace(etag="v1") for info in super().list(prefix))

        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            super().read_into(key, start, buffer)

        def describe(self, key: str) -> str:
            return key

    register("terse", lambda url, settings: Terse(url.partition("://")[2]))
    values = {name: rng.sample(range(100), 8) for name in ("a", "b")}
    for name, numbers in values.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.array([numbers]))
    for _ in range(2):
        for name, numbers in values.items():
            pipeline = Pipeline.array(f"terse://{tmp_path}/{name}/x.npy", cache={"dir": str(tmp_path / "cache")})
            with loaderkit.build(
                pipeline.shuffle(False).read().batch(1), overrides={"prefetch.executor": "inline"}
            ) as loader:
                assert next(iter(loader))["data"].tolist() == [numbers]
    for name in values:
        np.save(tmp_path / name / "x.npy", np.zeros((1, 8), np.int64))
    with loaderkit.build(pipeline.shuffle(False).read().batch(1), overrides={"prefetch.executor": "inline"}) as loader:
        assert next(iter(loader))["data"].tolist() == [values["b"]], "it comes from the cache"


def test_temporary_errors_are_retried(tmp_path: Path) -> None:
    tried: list[str] = []

    class Flaky(FileConnector):
        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            tried.append(key)
            if len(tried) == 1:
                raise loaderkit.errors.TemporaryError(f"{key}: not now")
            super().read_into(key, start, buffer, etag=etag)

    register("flaky", lambda url, settings: Flaky(url.partition("://")[2]))
    np.save(tmp_path / "x.npy", np.arange(8))
    pipeline = Pipeline.array(f"flaky://{tmp_path}/x.npy").shuffle(False).read().batch(8)
    with loaderkit.build(pipeline) as loader:
        assert next(iter(loader))["data"].tolist() == [*range(8)]
    assert len(tried) > 1
