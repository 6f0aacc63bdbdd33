"""Defaults, sizes and durations, variables, paths and overrides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_cases import MINIMAL, Letters, double
from hypothesis import given
from hypothesis import strategies as st

import loaderkit
from loaderkit import Pipeline
from loaderkit._internal.config.yaml_text import from_yaml
from loaderkit._internal.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import load_yaml, parse


def test_the_defaults_are_those_of_the_design(write: Callable[[str], Path], tmp_path: Path) -> None:
    config = load_yaml(write(MINIMAL))
    assert config.version == 1
    assert config.name == "pipeline"  # of pipeline.yaml
    assert config.source.model_dump() == {
        "kind": "files",
        "url": str(tmp_path / "data"),
        "include": None,
        "classes": None,
        "labels": None,
        "label": "none",
        "fields": None,
        "optional": (),
        "limit": None,
        "listing": "fresh",
        "s3": {
            "region": None,
            "endpoint": None,
            "path_style": "auto",
            "anonymous": False,
            "profile": None,
            "part_size": "auto",
            "connections": 32,
            "max_attempts": 10,
            "md5": True,
        },
        "retry": {"total": "60s", "timeout": None},
        "cache": {"dir": None, "size": "50GiB", "verify": True},
        "read_ahead": {"memory": "2GiB", "requests": 32},
    }
    assert config.order.model_dump(mode="python") == {
        "shuffle": "global",
        "weights": None,
        "seed": 0,
        "epochs": None,
        "block": {"block": "8MiB", "window": 16, "lanes": 8},
    }
    assert config.prefetch.model_dump() == {
        "batches": 4,
        "memory": "2GiB",
        "concurrency": "auto",
        "executor": "auto",
        "processes": 1,
        "max_processes": None,
        "ray": {"address": "auto", "num_cpus": 1.0, "resources": {}, "strategy": "spread"},
        "restarts": 3,
        "timeout": "60s",
        "on_timeout": "warn",
    }
    assert (config.prefetch.memory, config.prefetch.timeout) == (2 * 2**30, 60.0)
    assert config.errors.model_dump() == {
        "on_bad_sample": "raise",
        "max_bad_samples": 100,
        "on_bad_shard": "raise",
        "max_bad_shards": 1,
        "quarantine": None,
    }
    assert config.output is None
    assert [stage.name for stage in config.stages] == ["read", "batch"]
    assert config.stages[0].args.model_dump() == {"name": None, "workers": "auto"}


@pytest.mark.parametrize(
    ("kind", "needed", "expected"),
    [
        ("decode", {}, {"exif_orientation": False, "fields": None, "masks": None, "device": "cpu"}),
        ("resize", {"size": 3}, {"interpolation": "bilinear", "antialias": True}),
        ("random_crop", {"size": 3}, {"padding": 0, "pad_if_needed": False, "fill": 0}),
        (
            "random_resized_crop",
            {"size": 3},
            {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "interpolation": "bilinear", "antialias": True},
        ),
        ("random_horizontal_flip", {}, {"p": 0.5}),
        ("color_jitter", {}, {"brightness": (1, 1), "contrast": (1, 1), "saturation": (1, 1), "hue": (0, 0)}),
        ("random_vertical_flip", {}, {"p": 0.5}),
        (
            "random_rotation",
            {"degrees": 3},
            {"degrees": (-3, 3), "interpolation": "nearest", "expand": False, "fill": 0},
        ),
        ("random_grayscale", {}, {"p": 0.1}),
        ("gaussian_blur", {"kernel_size": 3}, {"sigma": (0.1, 2.0)}),
        ("random_erasing", {}, {"p": 0.5, "scale": (0.02, 0.33), "ratio": (0.3, 3.3), "value": 0}),
        ("batch", {"size": 3}, {"drop_last": False, "ragged": {}, "pad_value": 0}),
        ("normalize", {}, {"mean": "imagenet", "std": "imagenet", "dtype": "float32"}),
        ("transfer", {}, {"device": "auto"}),
    ],
)
def test_defaults_of_stages(kind: str, needed: dict[str, Any], expected: dict[str, Any]) -> None:
    pipeline = Pipeline.files("data").read()
    if kind not in ("decode", "batch"):
        pipeline = pipeline.decode()
    if kind in ("normalize", "transfer"):
        pipeline = pipeline.batch(4)
    pipeline = getattr(pipeline, kind)(**needed)
    if kind not in ("batch", "normalize", "transfer"):
        pipeline = pipeline.batch(4)
    args = pipeline.config.stage(kind).args.model_dump()
    for name, value in expected.items():
        assert args[name] == value
    assert (args["workers"], args["name"]) == ("auto", None)


def test_names_of_stages() -> None:
    pipeline = (
        Pipeline.files("data")
        .read()
        .call(double)
        .call(double, name="mine")
        .call(double)
        .decode()
        .resize(30)
        .resize(20)
        .batch(4)
        .call(double)
    )
    names = [stage.name for stage in pipeline.config.stages]
    assert names == ["read", "call", "mine", "call-3", "decode", "resize", "resize-2", "batch", "call-4"]


# ------------------------------------------------------------------------------------------------- sizes and durations


@given(st.integers(1, 2**60))
def test_sizes_come_back(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes


@given(st.floats(1e-9, 1e12))
def test_durations_come_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [("8MiB", 8 * 2**20), ("2 GB", 2 * 10**9), ("64kib", 65536), (" 1.5 KiB ", 1536), ("7", 7), ("7B", 7), (12, 12)],
)
def test_sizes(text: Any, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1e6", "1MiBs", "1 M", None, True, 1.5, [1]])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"), [("60s", 60), ("500ms", 0.5), ("5min", 300), ("2h", 7200), ("1.5m", 90), (3, 3.0), ("4", 4)]
)
def test_durations(text: Any, value: float) -> None:
    assert parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 day", None, True, [1]])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ValueError, match="a duration such as"):
        parse_seconds(text)


@pytest.mark.parametrize("timeout", [0, -1, "0s", float("nan"), float("inf")])
def test_timeouts_that_cannot_be(timeout: Any) -> None:
    with pytest.raises(ConfigError, match=r"prefetch\.timeout"):
        parse({"source": {"kind": "files", "url": "x"}, "stages": ["read", {"batch": {"size": 1}}],
               "prefetch": {"timeout": timeout}})  # fmt: skip


# --------------------------------------------------------------------------------------------------------- variables


def test_variables(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LK_ROOT", "/somewhere")
    monkeypatch.setenv("LK_SIZE", "32")
    monkeypatch.setenv("LK_EMPTY", "")
    monkeypatch.delenv("LK_UNSET", raising=False)
    config = load_yaml(
        write("""\
name: a-${LK_UNSET:-b}-${LK_ROOT}-$${LK_ROOT}-$LK_ROOT-${LK_UNSET:-}
source: {kind: files, url: "${LK_ROOT}/train/${LK_EMPTY:-x}", include: "*.{jpg,png}", limit: "${LK_UNSET:-7}"}
order: {seed: "${LK_SIZE}"}
stages:
  - read
  - call: {function: "config_cases:double", args: {text: "$${not}", both: "${LK_SIZE}/$${LK_SIZE}"}}
  - batch: {size: "${LK_SIZE}", drop_last: "${LK_UNSET:-true}"}
""")
    )
    assert config.name == "a-b-/somewhere-${LK_ROOT}-$LK_ROOT-"
    assert getattr(config.source, "url", None) == "/somewhere/train"
    assert getattr(config.source, "include", None) == "*.{jpg,png}"
    assert config.source.limit == 7
    assert config.order.seed == 32
    assert config.stages[1].args.model_dump()["args"] == {"text": "${not}", "both": "32/${LK_SIZE}"}
    assert config.stage("batch").args.model_dump(include={"size", "drop_last"}) == {"size": 32, "drop_last": True}


@pytest.mark.parametrize(
    "folder", ["@scratch", "a: b", "{x", "[1, 2", "2024-05-01", "*", "&a", "%x", "x #1", "!t", "'", "-"]
)
def test_a_variable_may_hold_any_path(
    folder: str, write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LK_FOLDER", folder)
    config = load_yaml(write("source: {kind: files, url: '${LK_FOLDER}'}\nstages: [read, batch: {size: 4}]\n"))
    assert getattr(config.source, "url", None) == str(tmp_path / folder)


@pytest.mark.parametrize("kind", [None, "tar", "lines", "tfrecord", "parquet"])
def test_a_null_byte_in_a_path(kind: str | None) -> None:
    source = {"source": {"kind": kind, "url": "a\0b"}, "stages": ["read", {"batch": {"size": 2}}]}
    with pytest.raises(ConfigError, match=r"null byte"):
        next(iter(loaderkit.build("a\0b" if kind is None else source)))


def test_every_missing_variable_is_named(write: Callable[[str], Path]) -> None:
    path = write("""\
name: ${LK_MISSING_1}
source: {kind: files, url: "x/${LK_MISSING_2}/${LK_MISSING_3}"}
stages: [read, batch: {size: 4}]
""")
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    for number in (1, 2, 3):
        assert f"LK_MISSING_{number}" in str(caught.value)


# ------------------------------------------------------------------------------------------------- paths, overrides


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs" / "deep"
    folder.mkdir(parents=True)
    path = folder / "p.yaml"
    path.write_text(MINIMAL.replace("url: data", "url: ../data") + "errors: {quarantine: bad.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    for given_as in (path, Path("configs/deep/p.yaml"), Path("configs/../configs/deep/p.yaml")):
        config = load_yaml(given_as)
        assert Path(getattr(config.source, "url", "")) == tmp_path / "configs" / "data"
        assert config.errors.quarantine is not None
        assert Path(config.errors.quarantine).resolve() == folder / "bad.jsonl"
        assert config.name == "p"
    for url in ("/abs/x", "s3://bucket/prefix", "memory://", "file:///abs"):
        path.write_text(MINIMAL.replace("url: data", f"url: {url}"))
        assert getattr(load_yaml(path).source, "url", None) == url
    of_dict = parse({"source": {"kind": "files", "url": "data"}, "stages": ["read", {"batch": {"size": 4}}]})
    assert getattr(of_dict.source, "url", None) == str(tmp_path / "data")


@pytest.mark.parametrize("url", ["~loaderkit-no-such-user/data", "a\0b"])
def test_strange_paths_are_paths_or_config_errors(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    description = {"source": {"kind": "files", "url": url}, "stages": ["read", {"batch": {"size": 4}}]}
    try:
        config = parse(description)
    except ConfigError as error:
        assert "url" in str(error)  # noqa: PT017
    else:
        assert str(tmp_path) in getattr(config.source, "url", "")


FULL = """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - call: {function: "config_cases:double"}
  - resize: {size: 30}
  - call: {function: "config_cases:double", args: {factor: 3}}
  - resize: {size: 20, name: small}
  - batch: {size: 4}
"""


def test_overrides(write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_yaml(
        write(FULL),
        overrides={
            "stages.batch.size": 32,
            "stages.batch.drop_last": True,
            "stages.call-2.args.factor": 5,
            "stages.call.workers": 2,
            "stages.small.size": [7, 8],
            "stages.decode.exif_orientation": True,
            "source.url": "other",
            "source.limit": 9,
            "order.shuffle": "block",
            "order.block.lanes": 4,
            "prefetch": {"batches": 2},
            "errors.quarantine": "bad.jsonl",
            "name": "mine",
            "output": ["image"],
        },
    )
    by_name = {stage.name: stage.args.model_dump() for stage in config.stages}
    assert by_name["batch"]["size"] == 32
    assert by_name["batch"]["drop_last"] is True
    assert by_name["call-2"]["args"] == {"factor": 5}
    assert by_name["call"]["workers"] == 2
    assert by_name["call"]["args"] == {}
    assert by_name["small"]["size"] == (7, 8)
    assert by_name["resize"]["size"] == 30
    assert by_name["decode"]["exif_orientation"] is True
    assert getattr(config.source, "url", None) == str(elsewhere / "other")
    assert config.source.limit == 9
    assert (config.order.shuffle, config.order.block.lanes, config.order.block.window) == ("block", 4, 16)
    assert config.prefetch.batches == 2
    assert config.errors.quarantine == str(elsewhere / "bad.jsonl")
    assert (config.name, config.output) == ("mine", ("image",))
    assert load_yaml(write(FULL), overrides={"source.url": "s3://b/x"}).source.model_dump()["url"] == "s3://b/x"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"stages.bacth.size": 3}, ["'stages.bacth.size'", "no stage is called 'bacth'", "did you mean 'batch'?"]),
        ({"stages.call-3.workers": 3}, ["'call-3'", "call-2"]),
        ({"stagse.batch.size": 3}, ["'stagse'", "did you mean 'stages'?"]),
        ({"stages.batch.sise": 3}, ["stages.6.batch.sise", "did you mean 'size'?"]),
        ({"prefetch.memroy": "1GiB"}, ["prefetch.memroy", "did you mean 'memory'?"]),
        ({"stages.batch.size": "3"}, ["stages.6.batch.size", "integer"]),
        ({"order.block.lanes": 0}, ["order.block.lanes", "greater than 0"]),
        ({"": 3}, ["''"]),
        ({"source": "x"}, ["`source` is 'x'"]),
        ({"stages.batch": 3}, ["batch"]),
        ({"name.first": "x"}, ["name"]),
        ({"version.x": 1}, ["version"]),
        ({"stages": "read"}, ["`stages` is 'read'"]),
        ("abc", ["overrides are a mapping", "'abc'"]),
        ({5: 1}, ["override 5", "text"]),
    ],
)
def test_wrong_overrides(overrides: Any, said: list[str], write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_yaml(write(FULL), overrides=overrides)
    for part in said:
        assert part in str(caught.value)


def test_overrides_of_every_description(write: Callable[[str], Path]) -> None:
    overrides = {"stages.batch.size": 9}
    path = write(FULL)
    data = from_yaml(FULL)
    before = copy.deepcopy(data)
    assert parse(data, overrides=overrides).stage("batch").args.model_dump()["size"] == 9
    assert data == before, "the caller's dict was changed"
    assert Pipeline.from_yaml(path, overrides).config.stage("batch").args.model_dump()["size"] == 9


def test_overrides_of_a_pipeline_expand_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "${LK_NO_SUCH}").mkdir()
    (tmp_path / "${LK_NO_SUCH}" / "a.txt").write_text("a")
    made = Pipeline.files(tmp_path / "${LK_NO_SUCH}").read().decode().batch(1)
    for overrides in (None, {"prefetch.executor": "inline"}):
        with loaderkit.build(made, overrides=overrides) as loader:
            assert next(iter(loader))["txt"] == ["a"]


def test_overrides_of_a_pipeline_with_objects() -> None:
    made = Pipeline.dataset(Letters(10)).read().call(lambda sample: sample).batch(3)
    with loaderkit.build(made, overrides={"stages.batch.size": 5, "prefetch.executor": "inline"}) as loader:
        assert len(loader) == 2
        assert len(next(iter(loader))["x"]) == 5
