"""`sources` and `mix`: what is read, written and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_cases import Letters, double

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import load_yaml, parse

MIXED = """\
sources:
  - {name: web, kind: files, url: data, weight: 0.7, stages: [decode, call: {function: "config_cases:double", name: aug}]}
  - {name: code, kind: dataset, object: "config_cases:Letters", weight: 0.3, epochs: 2}
mix: {by: tokens, stop: all, changes: [{at: 100, weights: {web: 1, code: 0}}]}
stages: [read, batch: {size: 4}]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mixed.yaml").write_text(MIXED)
    return tmp_path / "mixed.yaml"


def test_read_and_written(path: Path) -> None:
    config = load_yaml(path)
    assert config.mixture is not None
    assert config.mixture.names == ["web", "code"]
    assert [stage.name for stage in config.mixture.members[0].stages] == ["decode.web", "aug.web"]
    assert config.mixture.members[0].args.url == str(path.parent / "data")  # type: ignore[attr-defined]
    for defaults in (False, True):
        (path.parent / "again.yaml").write_text(
            "name: mixed\n" + config.to_yaml(defaults=defaults).replace("name: mixed", "")
        )
        assert load_yaml(path.parent / "again.yaml") == config


def test_the_builder_describes_the_same(path: Path) -> None:
    web = Pipeline.files(str(path.parent / "data")).decode().call("config_cases:double", name="aug")
    code = Pipeline.dataset("config_cases:Letters")
    mixed = Pipeline.mix(
        {"web": web, "code": code},
        {"web": 0.7, "code": 0.3},
        by="tokens",
        stop="all",
        epochs={"code": 2},
        changes=[(100, {"web": 1, "code": 0})],
    )
    assert mixed.read().batch(4).named("mixed") == Pipeline.from_yaml(path)


def test_values_of_one_source_are_replaced(path: Path) -> None:
    overrides = {
        "sources.web.weight": 2.0,
        "sources.code.epochs": 3,
        "mix.stop": "first",
        "sources.web.url": "elsewhere",
    }
    config = load_yaml(path, overrides=overrides)
    assert config.mixture is not None
    assert [member.mixed.weight for member in config.mixture.members] == [2.0, 0.3]
    assert config.mixture.members[1].mixed.epochs == 3
    assert config.mixture.mix.stop == "first"
    assert config.mixture.members[0].args.url == str(Path.cwd() / "elsewhere")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no source is called 'wbe'; did you mean 'web'"):
        load_yaml(path, overrides={"sources.wbe.weight": 1})


LETTERS: dict[str, Any] = {"kind": "dataset", "object": "config_cases:Letters"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": LETTERS}, "`source` and `sources` exclude each other"),
        ({"sources": []}, "expected a list of sources"),
        ({"sources": [LETTERS]}, "'name' is missing"),
        ({"sources": [{"name": "a", **LETTERS, "weigth": 1}]}, "unknown key 'weigth'; did you mean 'weight'"),
        ({"sources": [{"name": "a", **LETTERS, "weight": -1.0}]}, "sources.0.weight"),
        ({"sources": [{"name": "a", **LETTERS}, {"name": "a", **LETTERS}]}, "two sources are called 'a'"),
        ({"sources": [{"name": "a", "kind": "iterable", "object": "x:y"}]}, "kind: iterable cannot be mixed"),
        ({"sources": [{"name": "a", "kind": "checkpoint", "url": "x"}]}, "kind: checkpoint cannot be mixed"),
        ({"sources": [{"name": "a", **LETTERS, "repeat": True, "epochs": 2}]}, "`repeat: true` has no end"),
        ({"sources": [{"name": "a", **LETTERS, "epochs": 2}], "mix": {"stop": "never"}}, "remove `epochs`"),
        ({"mix": {"by": "bytes"}}, "mix.by"),
        ({"mix": {"changes": [{"at": 5, "weights": {"a": 1.0}}]}}, "give the weight of every source, .*: b is missing"),
        ({"mix": {"changes": [{"at": 5, "weights": {"a": 1.0, "b": 1.0, "c": 1.0}}]}}, "no source is called 'c'"),
        ({"mix": {"changes": [{"at": n, "weights": {"a": 1.0, "b": 1.0}} for n in (5, 5)]}}, "ascending positions"),
        ({"sources": [{"name": "a", **LETTERS, "stages": ["read"]}]}, "belongs to the common `stages`"),
        ({"sources": [{"name": "a", **LETTERS, "stages": [{"batch": {"size": 2}}]}]}, "belongs to the common `stages`"),
        (
            {"sources": [{"name": "a", **LETTERS, "stages": ["decoed"]}]},
            "unknown stage 'decoed'; did you mean 'decode'",
        ),
        (
            {"sources": [{"name": "a", **LETTERS, "stages": [{"call": {"function": "a:b", "workers": 2}}]}]},
            "run in the workers of `read`",
        ),
        (
            {"sources": [{"name": "a", "kind": "files", "url": "x", "stages": [{"decode": {"device": "gpu"}}]}]},
            "whole batches",
        ),
        (
            {"sources": [{"name": "a", "kind": "files", "url": "x", "stages": [{"resize": {"size": 4}}]}]},
            "put `decode` before",
        ),
        ({"order": {"shuffle": "block"}}, "block needs a source that knows where its bytes lie"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    good = {"sources": [{"name": "a", **LETTERS}, {"name": "b", **LETTERS}], "stages": ["read", {"batch": {"size": 4}}]}
    parse(good)
    with pytest.raises(ConfigError, match=message):
        parse({**good, **change})


def test_mix_without_sources() -> None:
    with pytest.raises(ConfigError, match="there is only `source`"):
        parse({"source": LETTERS, "mix": {"stop": "all"}, "stages": ["read", {"batch": {"size": 4}}]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": {"a": 1.0}}, "names not every source: b is missing"),
        ({"weights": {"a": 1.0, "b": 1.0, "bb": 2.0}}, "weights names 'bb'"),
        ({"epochs": {"c": 2}}, "epochs names 'c'"),
    ],
)
def test_what_the_builder_refuses(arguments: dict[str, Any], message: str) -> None:
    letters = Pipeline.dataset(Letters())
    with pytest.raises(ConfigError, match=message):
        Pipeline.mix({"a": letters, "b": letters}, **arguments)
    with pytest.raises(ConfigError, match="settings of its own"):
        Pipeline.mix({"a": letters.shuffle("none")})
    with pytest.raises(ConfigError, match="is a mixture itself"):
        Pipeline.mix({"a": Pipeline.mix({"b": letters})})


def test_a_lambda_cannot_be_written() -> None:
    mixed = Pipeline.mix({"a": Pipeline.dataset("config_cases:Letters").call(lambda sample: sample)}).read().batch(2)
    with pytest.raises(ConfigError, match="cannot be written as YAML"):
        mixed.to_yaml()
    assert (
        "config_cases:double"
        in Pipeline.mix({"a": Pipeline.dataset("config_cases:Letters").call(double)}).read().batch(2).to_yaml()
    )


def test_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MIXED.replace("kind: files, url: data", 'kind: dataset, object: "config_cases:Letters", args: {num: 70}')
    (tmp_path / "mixed.yaml").write_text(text.replace("decode, ", "").replace("by: tokens, ", ""))
    assert main(["explain", "--mix", str(tmp_path / "mixed.yaml")]) == 0
    told = capsys.readouterr().out
    assert "mixed: an epoch of 80 samples" in told
    assert "code   30.000 %  10 samples, 2.00 passes over 5 by then, used up" in told
    (tmp_path / "single.yaml").write_text(
        'source: {kind: files, url: ., include: "*.jpg"}\nstages: [read, batch: {size: 1}]\n'
    )
    (tmp_path / "a.jpg").write_bytes(b"")
    assert main(["explain", "--mix", str(tmp_path / "single.yaml")]) == 2
    assert "nothing to mix" in capsys.readouterr().err


def test_loader_knows_its_names(path: Path) -> None:
    with loaderkit.build(Pipeline.dataset(Letters()).read().batch(2)) as loader:
        assert loader.sources is None
