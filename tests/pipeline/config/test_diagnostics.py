"""What is wrong with a description is named: file, line, key, what was expected, and the nearest right name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_cases import MINIMAL
from wrong_structures import WRONG_STRUCTURES
from wrong_values import WRONG_VALUES

import loaderkit
from loaderkit._internal.config.yaml_text import from_yaml
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import load_yaml, parse

WRONG = WRONG_VALUES | WRONG_STRUCTURES


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, write: Callable[[str], Path]) -> None:
    text, key, said = WRONG[name]
    (line,) = [number for number, row in enumerate(text.splitlines(), 1) if "# <<" in row]
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    message = str(caught.value)
    assert len(caught.value.problems) == 1, message
    problem = caught.value.problems[0]
    assert problem.where == key
    at_line = f"line {line}: "
    if name in ("missing source", "missing stages") and problem.line is None:
        at_line = ""  # what is not there at all has no line
    else:
        assert problem.line == line
    assert message.startswith(f"{path}: {at_line}" + (f"{key}: " if key else ""))
    for part in said:
        assert part in message
    assert "\n" not in message
    # The same dict in Python gives the same complaint, without file and line.
    if "variable" in name or "duplicated" in name:
        return
    data = from_yaml(text)
    with pytest.raises(ConfigError) as of_dict:
        parse(data)
    for part in said:
        assert part in str(of_dict.value) or name == "key that is no text"
    with pytest.raises(ConfigError):
        loaderkit.build(data)


@pytest.mark.parametrize(
    ("source", "stages", "said"),
    [
        ({"kind": "array", "url": "x.raw"}, [], "source: `dtype` is missing: 'x.raw' is no .npy file"),
        (
            {"kind": "files", "url": "data", "label": "parent", "fields": {"label": "cls"}},
            [],
            "source: `label: parent` and a field named label exclude each other: remove one of them",
        ),
        ({"kind": "tar", "url": "a.tar", "include": "*.tar"}, [], "source: `url` names the archives already"),
        (
            {"kind": "files", "url": "data"},
            ["decode", {"batch": {"size": 4}}, {"normalize": {"mean": [1, 2], "std": [1, 2, 3]}}],
            "stages.3.normalize: `mean` and `std` need the same number of channels",
        ),
    ],
)
def test_what_contradicts_itself_is_said_as_it_is(source: dict[str, Any], stages: list[Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"source": source, "stages": ["read", *(stages or [{"batch": {"size": 4}}])]})
    assert str(caught.value).startswith(f"the pipeline: {said}")
    assert "expected" not in str(caught.value)
    assert "{" not in str(caught.value)


@pytest.mark.parametrize("pipeline", [None, 3, [MINIMAL], b"p.yaml"])
def test_pipelines_of_a_wrong_type(pipeline: Any) -> None:
    with pytest.raises(ConfigError, match=r"a path, a dict or a loaderkit\.Pipeline"):
        loaderkit.build(pipeline)


def test_several_errors_come_together_by_line(write: Callable[[str], Path]) -> None:
    path = write("""\
version: 3
nmae: x
source: {kind: files, url: data, limit: -1}
order: {seed: a}
stages:
  - read
  - decode: {masks: 3}
  - resize
  - normalize
  - btach: {size: 4}
prefetch: {batches: 0, memory: x}
errors: {on_bad_sample: ignore}
output: 5
""")
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    problems = caught.value.problems
    lines = [problem.line for problem in problems if problem.line is not None]
    assert lines == sorted(lines)
    assert [problem.line for problem in problems] == lines
    assert {1, 2, 3, 4, 7, 8, 10, 11, 12, 13} <= set(lines)
    assert lines.count(11) == 2
    message = str(caught.value)
    assert message.startswith(f"{path}: {len(problems)} problems\n")
    assert len(message.splitlines()) == len(problems) + 1
    for number, text in ((1, "version"), (2, "did you mean 'name'?"), (10, "did you mean 'batch'?")):
        assert any(f"line {number}: " in row and text in row for row in message.splitlines())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("random_flip", "did you mean 'random_volume_flip' or 'random_vertical_flip' or 'random_horizontal_flip'?"),
        ("resized_crop", "did you mean 'random_resized_crop'?"),
        ("random_flop", "did you mean 'random_crop'?"),
        ("decod", "did you mean 'decode'?"),
        ("embed", "expected one of read, decode"),
    ],
)
def test_names_with_all_words_of_a_wrong_one_come_first(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(
            {"version": 1, "source": {"kind": "files", "url": "data"}, "stages": ["read", name, {"batch": {"size": 4}}]}
        )
    assert said in str(caught.value)
