"""`Pipeline` as a user meets it: what may be said in how many ways, and what an editor is told of it."""

from __future__ import annotations

import inspect
import pydoc
from pathlib import Path
from typing import Any

import pytest

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.registry import SOURCES, STAGES

BASE = Pipeline.dataset([{"x": number, "y": -number} for number in range(20)]).read().batch(20)


def order_of(pipeline: Any) -> list[int]:
    with loaderkit.build(pipeline) as loader:
        numbers: list[int] = next(iter(loader))["x"].tolist()
    return numbers


@pytest.mark.parametrize("pipeline", [BASE.shuffle(False), BASE.shuffle("none")])
def test_without_shuffling_samples_come_in_their_order(pipeline: Pipeline) -> None:
    assert order_of(pipeline) == list(range(20))


def test_shuffling_is_on_by_default_and_may_be_said() -> None:
    assert order_of(BASE) == order_of(BASE.shuffle()) == order_of(BASE.shuffle(True)) != list(range(20))
    assert BASE.shuffle(True) == BASE.shuffle("global")


@pytest.mark.parametrize(("word", "mode"), [("false", "none"), ("true", "global"), ("none", "none")])
def test_the_same_in_yaml(word: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        f"source: {{kind: files, url: .}}\norder: {{shuffle: {word}}}\nstages: [read, {{batch: {{size: 2}}}}]\n"
    )
    pipeline = Pipeline.from_yaml(path)
    assert pipeline.config.order.shuffle == mode
    path.write_text(pipeline.to_yaml())
    assert Pipeline.from_yaml(path) == pipeline
    assert Pipeline.from_yaml(path, {"order.shuffle": False}).config.order.shuffle == "none"


@pytest.mark.parametrize("mode", [0, 1, None, "no", ["none"]])
def test_anything_else_is_refused(mode: Any) -> None:
    with pytest.raises(ConfigError, match=r"order\.shuffle"):
        _ = BASE.shuffle(mode).config


class Endless:
    """Samples by number, of any number."""

    def __getitem__(self, number: int) -> int:
        return number


def test_a_data_set_is_no_description() -> None:
    with pytest.raises(ConfigError, match=r"dict, not Endless: .*Pipeline\.dataset"):
        Pipeline(Endless())  # type: ignore[arg-type]


def test_a_description_without_stages_is_given_some() -> None:
    source = {"source": {"kind": "array", "url": "data.npy"}}
    assert Pipeline(source).read().batch(8) == Pipeline({**source, "stages": ["read", {"batch": {"size": 8}}]})


def test_output_takes_names_or_one_list_of_them() -> None:
    expected = ("y", "x")
    for made in (BASE.output("y", "x"), BASE.output(["y", "x"]), BASE.output(("y", "x"))):
        assert made.config.output == expected
        with loaderkit.build(made.shuffle(False)) as loader:
            second, first = next(iter(loader))
        assert (first + second).abs().sum() == 0
    assert BASE.output(["y"]).config.output == BASE.output("y").config.output == ("y",)
    assert BASE.output("y").output(None) == BASE
    for wrong in ([], [["x"], "y"], 3, {"x": "y"}):
        with pytest.raises(ConfigError, match="output: expected a list of fields"):
            _ = BASE.output(wrong).config  # type: ignore[arg-type]


def parameters_of(name: str) -> list[str]:
    return [str(parameter) for parameter in inspect.signature(getattr(Pipeline, name)).parameters.values()]


def test_signatures() -> None:
    assert parameters_of("resize") == [
        "self", "size", "interpolation='bilinear'", "antialias=True", "fields=None", "name=None", "workers='auto'"
    ]  # fmt: skip
    assert parameters_of("dataset") == ["object", "args={}", "fields=None", "thread_safe='auto'", "limit=None"]
    assert next(iter(inspect.signature(BASE.batch).parameters)) == "size"
    assert parameters_of("prefetch")[1] == "batches=4"
    assert parameters_of("errors")[1] == "on_bad_sample='raise'"


@pytest.mark.parametrize("kind", [*SOURCES, *STAGES])
def test_every_kind_is_completed_and_explained(kind: str) -> None:
    """On the class and on a pipeline: its arguments in its signature, and the meaning of each in its help."""
    args = SOURCES[kind].args if kind in SOURCES else STAGES[kind].args
    for owner in (Pipeline, BASE):
        assert kind in dir(owner)
        method = getattr(owner, kind)
        signature = inspect.signature(method)
        assert signature.parameters.keys() - {"self"} == args.model_fields.keys() - {"kind"}
        text = pydoc.plain(pydoc.render_doc(method))
        assert all(f"{name}: " in text for name in args.model_fields if name != "kind")


def test_the_help_of_the_class_has_every_kind() -> None:
    text = pydoc.plain(pydoc.render_doc(Pipeline))
    assert all(f" {kind}(" in text for kind in [*SOURCES, *STAGES])
