from __future__ import annotations

import copy
import dataclasses
import datetime
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import loaderkit
from loaderkit import Pipeline
from loaderkit.config import PipelineConfig
from loaderkit.errors import ConfigError
from loaderkit.parsing import load_yaml, parse
from loaderkit.schema import format_bytes, format_seconds, parse_bytes, parse_seconds

MINIMAL = """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
"""


def double(sample: dict[str, Any], factor: int = 2) -> dict[str, Any]:
    """A function that YAML can name."""
    return sample


class Letters:
    """A data set object."""

    def __init__(self, num: int = 5) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_text(text: str) -> Path:
        path = tmp_path / "pipeline.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


# ------------------------------------------------------------------------------------ one test for every wrong thing
# "<<" marks the line that the error must name. Then: the key it must name, and what else it must say.

WRONG: dict[str, tuple[str, str, list[str]]] = {
    "unknown section": (
        """\
source: {kind: files, url: data}
stage: [read]  # <<
stages: [read, batch: {size: 4}]
""",
        "stage",
        ["unknown key 'stage'", "did you mean 'stages'?"],
    ),
    "unknown section, unlike any": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
xyzzy: 1  # <<
""",
        "xyzzy",
        ["unknown key 'xyzzy'", "expected one of version, name, source, order, stages, prefetch, errors, output"],
    ),
    "unknown key of a section": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  batches: 2
  memroy: 1GiB  # <<
""",
        "prefetch.memroy",
        ["unknown key 'memroy'", "did you mean 'memory'?"],
    ),
    "unknown key of a part of a section": (
        """\
source: {kind: files, url: data}
order:
  shuffle: block
  block:
    lane: 3  # <<
stages: [read, batch: {size: 4}]
""",
        "order.block.lane",
        ["unknown key 'lane'", "did you mean 'lanes'?"],
    ),
    "unknown key of the source": (
        """\
source:
  kind: files
  url: data
  lable: parent  # <<
stages: [read, batch: {size: 4}]
""",
        "source.lable",
        ["unknown key 'lable'", "did you mean 'label'?"],
    ),
    "unknown kind": (
        """\
source:
  kind: file  # <<
  url: data
stages: [read, batch: {size: 4}]
""",
        "source.kind",
        ["unknown kind 'file'", "did you mean 'files'?"],
    ),
    "missing kind": (
        """\
source:  # <<
  url: data
stages: [read, batch: {size: 4}]
""",
        "source.kind",
        ["`kind` is missing", "files", "tar"],
    ),
    "missing url": (
        """\
source:  # <<
  kind: files
stages: [read, batch: {size: 4}]
""",
        "source",
        ["'url' is missing", "folder"],
    ),
    "unknown stage": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decod  # <<
  - batch: {size: 4}
""",
        "stages.1",
        ["unknown stage 'decod'", "did you mean 'decode'?"],
    ),
    "unknown argument of a stage": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - random_crop:
      size: 3
      paddin: 4  # <<
  - batch: {size: 4}
""",
        "stages.2.random_crop.paddin",
        ["unknown key 'paddin'", "did you mean 'padding'?"],
    ),
    "wrong type": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch:
      size: "64"  # <<
""",
        "stages.1.batch.size",
        ["a valid integer", "'64'"],
    ),
    "boolean for a number": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch:
      size: true  # <<
""",
        "stages.1.batch.size",
        ["integer", "True"],
    ),
    "bad value": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch:
      size: 0  # <<
""",
        "stages.1.batch.size",
        ["greater than 0", "not 0"],
    ),
    "bad choice": (
        """\
source: {kind: files, url: data}
order:
  shuffle: globl  # <<
stages: [read, batch: {size: 4}]
""",
        "order.shuffle",
        ["'global', 'block' or 'none'", "'globl'"],
    ),
    "bad size in bytes": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  memory: lots  # <<
""",
        "prefetch.memory",
        ["2GiB", "'lots'"],
    ),
    "size of nothing": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  memory: 0MiB  # <<
""",
        "prefetch.memory",
        ["greater than 0"],
    ),
    "bad duration": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  timeout: 5 fortnights  # <<
""",
        "prefetch.timeout",
        ["60s", "'5 fortnights'"],
    ),
    "bad probability": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - random_horizontal_flip: {p: 1.5}  # <<
  - batch: {size: 4}
""",
        "stages.2.random_horizontal_flip.p",
        ["less than or equal to 1", "1.5"],
    ),
    "bad pattern of a device": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: {size: 4}
  - transfer:
      device: gpu0  # <<
""",
        "stages.2.transfer.device",
        ["'gpu0'", "cuda"],
    ),
    "missing argument": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: {drop_last: true}  # <<
""",
        "stages.1.batch",
        ["'size' is missing"],
    ),
    "stage without its argument": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch  # <<
""",
        "stages.1.batch",
        ["'size' is missing"],
    ),
    "arguments without names": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: 64  # <<
""",
        "stages.1.batch",
        ["arguments by name", "size", "64"],
    ),
    "two stages in one item": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - {decode: {}, batch: {size: 4}}  # <<
""",
        "stages.1",
        ["a stage is a name"],
    ),
    "duplicated key": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
order:
  seed: 1
  seed: 2  # <<
""",
        "order.seed",
        ["twice"],
    ),
    "duplicated section": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
source: {kind: tar, url: data}  # <<
""",
        "source",
        ["twice"],
    ),
    "key that is no text": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
3: 4  # <<
""",
        "",
        ["key 3 is not text"],
    ),
    "batch stage before batch": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - normalize  # <<
  - batch: {size: 4}
""",
        "stages.2",
        ["`normalize`", "after `batch`"],
    ),
    "sample stage after batch": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - batch: {size: 4}
  - resize: {size: 3}  # <<
""",
        "stages.3",
        ["`resize`", "before `batch`"],
    ),
    "no batch": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode  # <<
""",
        "stages.1",
        ["no `batch`"],
    ),
    "no read": (
        """\
source: {kind: files, url: data}
stages:
  - decode  # <<
  - batch: {size: 4}
""",
        "stages.0",
        ["`read`", "missing"],
    ),
    "read not first": (
        """\
source: {kind: files, url: data}
stages:
  - decode
  - read  # <<
  - batch: {size: 4}
""",
        "stages.1",
        ["`read` must be the first"],
    ),
    "second batch": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - batch: {size: 4}
  - batch: {size: 4}  # <<
""",
        "stages.2",
        ["second `batch`"],
    ),
    "normalize on text": (
        """\
source: {kind: files, url: data, include: "**/*.txt"}
stages:
  - read
  - decode
  - batch: {size: 4}
  - normalize  # <<
""",
        "stages.3",
        ["`normalize` acts on images", "text"],
    ),
    "normalize on a text field": (
        """\
source: {kind: tar, url: data, fields: {image: "jpg;png", caption: txt}}
stages:
  - read
  - decode
  - batch: {size: 4}
  - normalize: {fields: [caption]}  # <<
""",
        "stages.3",
        ["'caption' is text"],
    ),
    "a field that does not exist": (
        """\
source: {kind: tar, url: data, fields: {image: "jpg;png", caption: txt}}
stages:
  - read
  - decode
  - resize: {size: 3, fields: [imgae]}  # <<
  - batch: {size: 4}
""",
        "stages.2",
        ["'imgae'", "did you mean 'image'?"],
    ),
    "images that are still encoded": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - resize: {size: 3}  # <<
  - batch: {size: 4}
""",
        "stages.1",
        ["`resize` needs images", "`decode`"],
    ),
    "block order of an object": (
        """\
source: {kind: dataset, object: "test_config:Letters"}
order:
  shuffle: block  # <<
stages: [read, batch: {size: 4}]
""",
        "order.shuffle",
        ["bytes", "global or none"],
    ),
    "value next to one of a fixed list": (
        """\
source:
  kind: array
  url: tokens.bin
  dtype: unit16  # <<
stages: [read, batch: {size: 4}]
""",
        "source.dtype",
        ["or 'complex128', not 'unit16'; did you mean 'uint16'?"],
    ),
    "number for a list": (
        """\
source:
  kind: array
  url: tokens.bin
  dtype: uint16
  shape: 4  # <<
stages: [read, batch: {size: 4}]
""",
        "source.shape",
        ["expected a list, not 4"],
    ),
    "list that is too short": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize:
      size: [3]  # <<
  - batch: {size: 4}
""",
        "stages.2.resize.size",
        ["expected a valid integer or a list of 2 items, not [3]"],
    ),
    "list that is empty": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize:
      size: []  # <<
  - batch: {size: 4}
""",
        "stages.2.resize.size",
        ["expected a valid integer or a list of 2 items, not []"],
    ),
    "list that is too long": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize:
      size: [3, 4, 5]  # <<
  - batch: {size: 4}
""",
        "stages.2.resize.size",
        ["expected a valid integer or a list of at most 2 items"],
    ),
    "one bound of two": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - color_jitter:
      brightness: [1]  # <<
  - batch: {size: 4}
""",
        "stages.2.color_jitter.brightness",
        ["expected a list of 2 items, not [1]"],
    ),
    "one name for two fields of an object": (
        """\
source:
  kind: dataset
  object: "test_config:Letters"
  fields: [x, y, x]  # <<
stages: [read, batch: {size: 4}]
""",
        "source.fields",
        ["expected names that differ", "'y'"],
    ),
    "two stages of one name": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize: {size: 3, name: center_crop}
  - center_crop: {size: 3}  # <<
  - batch: {size: 4}
""",
        "stages.3",
        ["two stages are called 'center_crop'"],
    ),
    "missing variable": (
        """\
source:
  kind: files
  url: ${LOADERKIT_TEST_NOTHING}  # <<
stages: [read, batch: {size: 4}]
""",
        "source.url",
        ["no variable LOADERKIT_TEST_NOTHING", "${LOADERKIT_TEST_NOTHING:-default}"],
    ),
    "missing stages": ("source: {kind: files, url: data}  # <<\n", "stages", ["`stages` is missing"]),
    "no stages": (
        """\
source: {kind: files, url: data}
stages: []  # <<
""",
        "stages",
        ["`stages` is empty"],
    ),
    "missing source": ("stages: [read, batch: {size: 4}]  # <<\n", "source", ["`source` is missing"]),
    "source that is text": (
        """\
source: data  # <<
stages: [read, batch: {size: 4}]
""",
        "source",
        ["`source` is 'data'", "kind"],
    ),
    "section that is a list": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch: [4]  # <<
""",
        "prefetch",
        ["expected a mapping", "batches"],
    ),
    "another version": (
        """\
version: 2  # <<
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
""",
        "version",
        ["version 1", "not 2"],
    ),
    "name that is a number": (
        """\
source: {kind: files, url: data}
name: 7  # <<
stages: [read, batch: {size: 4}]
""",
        "name",
        ["text", "7"],
    ),
    "output that is text": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
output: image  # <<
""",
        "output",
        ["list of fields", "'image'"],
    ),
    "no process": (
        """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
prefetch:
  processes: 0  # <<
""",
        "prefetch.processes",
        ["greater than 0", "not 0"],
    ),
    "function without a module": (
        """\
source: {kind: files, url: data}
stages:
  - read
  - call: {function: cutout}  # <<
  - batch: {size: 4}
""",
        "stages.1.call.function",
        ["package.module:function", "'cutout'"],
    ),
    "field with two extensions' owners": (
        """\
source:
  kind: tar
  url: data
  fields: {a: jpg, b: "png;jpg"}  # <<
stages: [read, batch: {size: 4}]
""",
        "source.fields",
        ["expected each extension once, not 'jpg' for both 'a' and 'b'"],
    ),
    "label twice": (
        """\
source: {kind: files, url: data, label: parent, fields: {label: cls, image: jpg}}  # <<
stages: [read, batch: {size: 4}]
""",
        "source",
        ["label"],
    ),
}


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
    import yaml

    data = yaml.safe_load(text)
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
            "source: `label: parent` and a field called label: which of the two is the label?",
        ),
        ({"kind": "tar", "url": "a.tar", "include": "*.tar"}, [], "source: `url` names the archives already"),
        (
            {"kind": "files", "url": "data"},
            ["decode", {"batch": {"size": 4}}, {"normalize": {"mean": [1, 2], "std": [1, 2, 3]}}],
            "stages.3.normalize: `mean` and `std` have to be for the same number of channels",
        ),
    ],
)
def test_what_contradicts_itself_is_said_as_it_is(source: dict[str, Any], stages: list[Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"source": source, "stages": ["read", *(stages or [{"batch": {"size": 4}}])]})
    assert str(caught.value).startswith(f"the pipeline: {said}")
    assert "expected" not in str(caught.value)
    assert "{" not in str(caught.value)


def test_invalid_yaml(write: Callable[[str], Path]) -> None:
    path = write("source: {kind: files\nstages: [read\n")
    with pytest.raises(ConfigError, match=r"line \d+: not valid YAML") as caught:
        load_yaml(path)
    assert str(path) in str(caught.value)
    for text in ("\tsource: x\n", "a: b: c\n", "x: !!python/name:os.system ''\n", "--- a\n--- b\n", "x: *nowhere\n"):
        with pytest.raises(ConfigError, match="not valid YAML"):
            load_yaml(write(text))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("version: 1\nname: a\0b\n", 2, "special characters are not allowed ('\\x00')"),
        ("version: 1\n[1, 2]: x\n", 2, "the key [1, 2] is not text"),
        ("version: 1\n? {a: b}\n: x\n", 2, "the key {'a': 'b'} is not text"),
        ("version: 1\nname: " + "[" * 3000 + "]" * 3000 + "\n", 2, "nested too deeply"),
        ("version: 1\nname: 2024-13-45\n", 2, "'2024-13-45' is no value of its kind"),
        ("version: 1\n!!int x: y\n", 2, "'x' is no value of its kind"),
    ],
)
def test_yaml_that_its_reader_stumbles_over(text: str, line: int, said: str, write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_yaml(write(text))
    assert f"line {line}: " in str(caught.value)
    assert said in str(caught.value)


def test_a_variable_that_looks_like_a_wrong_date(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "2024-13-45")
    text = "name: ${NAME}\nsource: {kind: files, url: data}\nstages: [read, batch: {size: 4}]\n"
    assert load_yaml(write(text)).name == "2024-13-45"


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "text\n", "3\n", "null\n"])
def test_yaml_that_is_no_mapping(text: str, write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"a pipeline is a mapping with at least `source` and `stages`"):
        load_yaml(write(text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path / 'absent.yaml'))}.*No such file"):
        load_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="directory"):
        loaderkit.build(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"binary\.yaml.*utf-8"):
        loaderkit.build(str(binary))
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match=r"loop\.yaml"):
        loaderkit.build(loop)


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


# ---------------------------------------------------------------------------------------------------------- defaults


def test_the_defaults_are_those_of_the_design(write: Callable[[str], Path], tmp_path: Path) -> None:
    config = load_yaml(write(MINIMAL))
    assert config.version == 1
    assert config.name == "pipeline"  # of pipeline.yaml
    assert config.source.model_dump() == {
        "kind": "files",
        "url": str(tmp_path / "data"),
        "include": "**/*",
        "label": "none",
        "fields": None,
        "limit": None,
        "s3": {
            "region": None,
            "endpoint": None,
            "path_style": "auto",
            "anonymous": False,
            "profile": None,
            "part_size": "8MiB",
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
        "seed": 0,
        "epochs": None,
        "block": {"block": "8MiB", "window": 16, "lanes": 8},
    }
    assert config.prefetch.model_dump() == {
        "batches": 4,
        "memory": "2GiB",
        "concurrency": "auto",
        "executor": "thread",
        "processes": 1,
        "on_timeout": "warn",
        "timeout": "60s",
    }
    assert (config.prefetch.memory, config.prefetch.timeout) == (2 * 2**30, 60.0)
    assert config.errors.model_dump() == {"on_bad_sample": "raise", "max_bad_samples": 100, "quarantine": None}
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
  - call: {function: "test_config:double", args: {text: "$${not}", both: "${LK_SIZE}/$${LK_SIZE}"}}
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
  - call: {function: "test_config:double"}
  - resize: {size: 30}
  - call: {function: "test_config:double", args: {factor: 3}}
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
    import yaml

    overrides = {"stages.batch.size": 9}
    path = write(FULL)
    data = yaml.safe_load(FULL)
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


# --------------------------------------------------------------------------------- one config of three descriptions


def test_yaml_dict_and_pipeline_are_one_config(write: Callable[[str], Path], tmp_path: Path) -> None:
    import yaml

    text = """\
name: all
source: {kind: files, url: URL, include: ["**/*.jpg", "**/*.png"], label: parent, limit: 100}
order: {shuffle: block, seed: 4, epochs: 3, block: {block: 4MiB, window: 2, lanes: 2}}
stages:
  - read: {workers: 2}
  - decode: {exif_orientation: true}
  - random_resized_crop: {size: [30, 40], scale: [0.1, 1.0]}
  - random_horizontal_flip
  - color_jitter: {brightness: 0.4, hue: [-0.1, 0.2]}
  - call: {function: "test_config:double", args: {factor: 3}}
  - batch: {size: 8, drop_last: true}
  - transfer: {device: cpu}
  - normalize: {mean: [0.5, 0.5, 0.5], std: imagenet}
prefetch: {batches: 2, memory: 64MiB, concurrency: 3, timeout: 5min}
errors: {on_bad_sample: skip, max_bad_samples: 3}
output: [image, label]
""".replace("URL", str(tmp_path / "data"))
    of_yaml = load_yaml(write(text))
    of_dict = parse(yaml.safe_load(text))
    made = (
        Pipeline.files(tmp_path / "data", include=("**/*.jpg", "**/*.png"), label="parent", limit=100)
        .named("all")
        .shuffle("block", seed=4, block="4MiB", window=2, lanes=2)
        .epochs(3)
        .read(workers=2)
        .decode(exif_orientation=True)
        .random_resized_crop((30, 40), scale=(0.1, 1.0))
        .random_horizontal_flip()
        .color_jitter(0.4, hue=(-0.1, 0.2))
        .call("test_config:double", {"factor": 3})
        .batch(8, drop_last=True)
        .transfer("cpu")
        .normalize(mean=(0.5, 0.5, 0.5), std="imagenet")
        .prefetch(batches=2, memory="64MiB", concurrency=3, timeout="5min")
        .errors(on_bad_sample="skip", max_bad_samples=3)
        .output("image", "label")
    )
    assert of_yaml == of_dict == made.config
    assert Pipeline.of(of_yaml) == made
    assert parse(made.config.to_dict()) == made.config
    assert parse(made.config.to_dict(defaults=True)) == made.config
    for defaults in (False, True):
        path = write(made.to_yaml(defaults=defaults))
        assert Pipeline.from_yaml(path) == made
        assert Pipeline.from_yaml(path).config == made.config


# ------------------------------------------------------------------------------------------ any pipeline, round trip

TEXTS = st.one_of(
    st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
    st.sampled_from(
        ["${HOME}", "$${HOME}", "${", "${1}", "$$${X:-y}", "a${X", "${X:-}", "$", "null", "yes", "1e3", "~", "2020-01-01",
         "- a", "a: b", "#x", "'", '"', "\n", "é中😀", " lead", "%", "@x", "\x85", "\u2028", "0x1f", "1_000", "=", "<<"]
    ),
)  # fmt: skip
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,6}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SIZE = st.integers(1, 500) | st.lists(st.integers(1, 500), min_size=2, max_size=2)
FIELDS = st.none() | st.lists(TEXTS, min_size=1, max_size=2)
POSITIVE = st.floats(1e-3, 1e3)
RANGE = st.tuples(POSITIVE, POSITIVE).map(sorted)
UNIT = st.floats(0, 1)
FACTOR = st.floats(0, 5) | RANGE
CHANNELS = st.just("imagenet") | st.lists(st.floats(0.01, 2), min_size=3, max_size=3)


def some(required: dict[str, Any] | None = None, **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required or {}, optional=optional)


COMMON: dict[str, Any] = {"workers": st.just("auto") | st.integers(1, 9)}
STAGES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "resize": some({"size": SIZE}, interpolation=st.sampled_from(["bilinear", "bicubic", "nearest"]),
                   antialias=st.booleans(), fields=FIELDS, **COMMON),
    "center_crop": some({"size": SIZE}, fields=FIELDS, **COMMON),
    "random_crop": some({"size": SIZE}, padding=st.integers(0, 9), pad_if_needed=st.booleans(),
                        fill=st.integers(0, 255), fields=FIELDS, **COMMON),
    "random_resized_crop": some({"size": SIZE}, scale=st.tuples(UNIT, UNIT).map(sorted), ratio=RANGE, fields=FIELDS,
                                antialias=st.booleans(), **COMMON),
    "random_horizontal_flip": some(p=UNIT, fields=FIELDS, **COMMON),
    "color_jitter": some(brightness=FACTOR, contrast=FACTOR, saturation=FACTOR, hue=st.floats(0, 0.5), fields=FIELDS,
                         **COMMON),
    "call": some({"function": st.just("test_config:double")}, args=st.dictionaries(TEXTS, JSON, max_size=3), **COMMON),
}  # fmt: skip
SOURCES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    some({"kind": st.just("files"), "url": TEXTS.filter(lambda t: t and not t.startswith("~"))},
         label=st.sampled_from(["parent", "none"]), limit=st.none() | st.integers(1, 10**9)),
    some({"kind": st.just("tar"), "url": st.just("s3://b/${X}")},
         fields=st.just({"image": "jpg;png", "é": "txt"}), limit=st.integers(1, 10**9)),
    some({"kind": st.just("dataset"), "object": st.just("test_config:Letters")}, args=st.dictionaries(TEXTS, JSON, max_size=2),
         fields=st.none() | st.lists(TEXTS, min_size=1, max_size=3, unique=True)),
)  # fmt: skip


@st.composite
def descriptions(draw: st.DrawFn) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(sorted(STAGES)), max_size=4))
    stages: list[Any] = ["read"]
    # A call before, so that nothing is known about the fields and any of them may be named.
    stages.append({"call": {"function": "test_config:double"}})
    if draw(st.booleans()):
        stages.append(
            {
                "decode": draw(
                    some(masks=FIELDS, fields=FIELDS, exif_orientation=st.booleans(), max_pixels=st.integers(1, 10**8))
                )
            }
        )
    for kind in kinds:
        args = draw(STAGES[kind])
        is_bare = draw(st.booleans()) and not args
        stages.append(kind if is_bare else {kind: args})
    batch = draw(
        some({"size": st.integers(1, 999)}, drop_last=st.booleans(), pad_value=st.floats(allow_nan=False), **COMMON,
             ragged=st.dictionaries(TEXTS, st.sampled_from(["list", "pad"]), max_size=2))
    )  # fmt: skip
    stages.append({"batch": batch})
    if draw(st.booleans()):
        stages.append({"transfer": {"device": draw(st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]))}})
    if draw(st.booleans()):
        stages.append(
            {
                "normalize": draw(
                    some(mean=CHANNELS, std=CHANNELS, dtype=st.sampled_from(["float16", "float32"]), fields=FIELDS)
                )
            }
        )
    source = draw(SOURCES)
    found: dict[str, Any] = {"source": source, "stages": stages}
    if draw(st.booleans()):
        found["name"] = draw(TEXTS)
    modes = ["global", "none"] if source["kind"] == "dataset" else ["global", "none", "block"]
    found["order"] = draw(
        some(shuffle=st.sampled_from(modes), seed=st.integers(0, 2**64), epochs=st.none() | st.integers(1, 99),
             block=some(block=st.integers(1, 2**50), window=st.integers(1, 99), lanes=st.integers(1, 99)))
    )  # fmt: skip
    found["prefetch"] = draw(
        some(batches=st.integers(1, 99), memory=st.integers(1, 2**50), timeout=st.floats(1e-6, 1e9),
             concurrency=st.just("auto") | st.integers(1, 99), executor=st.sampled_from(["inline", "thread"]))
    )  # fmt: skip
    found["errors"] = draw(
        some(on_bad_sample=st.sampled_from(["raise", "skip", "replace"]), max_bad_samples=st.integers(0, 10**6),
             quarantine=st.none() | TEXTS.filter(lambda t: t and not t.startswith("~")))
    )  # fmt: skip
    if draw(st.booleans()):
        found["output"] = draw(st.lists(TEXTS, min_size=1, max_size=3))
    return found


@given(descriptions(), st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_yaml_round_trip(tmp_path_factory: pytest.TempPathFactory, description: dict[str, Any], defaults: bool) -> None:
    check_round_trip(tmp_path_factory.getbasetemp(), description, defaults)


@pytest.mark.prove
@given(descriptions(), st.booleans())
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
def test_yaml_round_trip_of_many(
    tmp_path_factory: pytest.TempPathFactory, description: dict[str, Any], defaults: bool
) -> None:
    check_round_trip(tmp_path_factory.getbasetemp(), description, defaults)


def check_round_trip(folder: Path, description: dict[str, Any], defaults: bool) -> None:
    before = copy.deepcopy(description)
    config = parse(description, expand=False)
    assert description == before
    assert parse(config.to_dict(defaults=defaults), expand=False) == config
    path = folder / "round-trip.yaml"
    text = config.to_yaml(defaults=defaults)
    path.write_text(text, encoding="utf-8", newline="")
    again = load_yaml(path)
    assert again == config, text
    assert again.to_yaml(defaults=defaults) == text


@pytest.mark.parametrize("value", ["${", "${1}", "a${b", "$${", "$$${X}", "${X:-", "${é}", "$$${"])
def test_texts_that_are_nearly_variables(value: str, write: Callable[[str], Path]) -> None:
    description = {
        "name": value,
        "source": {"kind": "files", "url": "data"},
        "stages": ["read", {"call": {"function": "test_config:double", "args": {"x": value}}}, {"batch": {"size": 4}}],
    }
    config = parse(description, expand=False)
    assert config.name == value
    assert load_yaml(write(config.to_yaml())) == config


@pytest.mark.parametrize(
    "value", [(1, 2), datetime.date(2020, 1, 1), {1: "one"}, b"bytes", {"a", "b"}, math.inf, [(1, (2,))]]
)
def test_arguments_of_calls_come_back_or_are_refused(value: Any, write: Callable[[str], Path]) -> None:
    config = Pipeline.files("data").read().call("test_config:double", {"x": value}).batch(4).config
    try:
        text = config.to_yaml()
    except ConfigError as error:
        assert "YAML" in str(error)  # noqa: PT017 - refusing is fine, changing the value is not
    else:
        assert load_yaml(write(text)) == config


def test_what_no_file_can_name() -> None:
    for made in (
        Pipeline.files("data").read().call(lambda sample: sample).batch(4),
        Pipeline.dataset(Letters()).read().batch(4),
    ):
        assert isinstance(made.config, PipelineConfig)
        with pytest.raises(ConfigError, match="cannot be written"):
            made.to_yaml()


def test_arguments_of_an_object_that_is_ready() -> None:
    with pytest.raises(ConfigError, match=r"source\.args: expected no arguments, as `object` is not the name.*'num'"):
        _ = Pipeline.dataset(Letters(), args={"num": 3}).read().batch(2).config
    assert Pipeline.dataset(Letters(), args={}).read().batch(2).config


def test_a_function_is_written_by_its_name(write: Callable[[str], Path]) -> None:
    made = Pipeline.files("data").read().call(double, args={"factor": 3}).batch(4)
    text = made.to_yaml()
    assert f"{double.__module__}:double" in text
    assert load_yaml(write(text)).stage("call").args.model_dump()["function"] == f"{double.__module__}:double"


# ------------------------------------------------------------------------------------------- anchors, aliases, bombs


def test_anchors_and_merges(write: Callable[[str], Path]) -> None:
    config = load_yaml(
        write("""\
source: {kind: files, url: data}
stages:
  - read
  - decode
  - resize: &small {size: 30, antialias: false}
  - resize: {<<: *small, interpolation: bicubic}
  - resize: {<<: *small, size: 7}
  - resize: *small
  - batch: {size: 4}
""")
    )
    found = [stage.args.model_dump() for stage in config.stages if stage.kind == "resize"]
    assert [args["size"] for args in found] == [30, 30, 7, 30]
    assert [args["antialias"] for args in found] == [False] * 4
    assert found[1]["interpolation"] == "bicubic"


BOMBS = {
    "lists": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
    "mappings": "a0: &a0 {k: v}\n"
    + "".join(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 9)),
    "merges": "a0: &a0 {k: v}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 7)),
    "itself": "a: &a [*a]\n",
    "itself in a mapping": "a: &a {b: *a}\n",
    "deep": "a: " + "[" * 200 + "]" * 200 + "\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name: str, write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"not valid YAML.*(aliases|values|deep)") as caught:
        load_yaml(write(BOMBS[name] + MINIMAL))
    assert len(str(caught.value)) < 2000


# --------------------------------------------------------------------------------------------------- Pipeline, frozen


def test_pipelines_never_change() -> None:
    base = Pipeline.files("data").read()
    first, second = base.batch(4), base.decode().batch(8)
    assert [stage.name for stage in first.config.stages] == ["read", "batch"]
    assert [stage.name for stage in second.config.stages] == ["read", "decode", "batch"]
    assert first.shuffle(seed=3).config.order.seed == 3
    assert first.config.order.seed == 0
    assert first.prefetch(batches=2).prefetch(memory="1MiB").config.prefetch.batches == 2
    assert first.config.prefetch.batches == 4
    assert first.shuffle("block", lanes=2).epochs(3).config.order.block.lanes == 2
    assert first != second
    assert first == Pipeline.files("data").read().batch(4)
    assert hash(first) == hash(Pipeline.files("data").read().batch(4))
    assert first.errors(on_bad_sample="skip").config.errors.on_bad_sample == "skip"


def test_later_changes_of_what_was_given_do_not_reach_the_pipeline() -> None:
    args, include = {"factor": 1}, ["*.jpg"]
    made = Pipeline.files("data", include=include).read().call("test_config:double", args=args).batch(4)
    args["factor"] = 2
    include.append("*.png")
    assert made.config.stage("call").args.model_dump()["args"] == {"factor": 1}
    assert made.config.source.model_dump()["include"] == ("*.jpg",)
    description: dict[str, Any] = {
        "source": {"kind": "files", "url": "data"},
        "stages": ["read", {"call": {"function": "test_config:double", "args": {"x": [1]}}}, {"batch": {"size": 4}}],
    }
    config = parse(description)
    description["stages"][1]["call"]["args"]["x"].append(2)
    assert config.stage("call").args.model_dump()["args"] == {"x": [1]}


def test_configs_are_frozen() -> None:
    config = Pipeline.files("data").read().batch(4).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "x"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stages[0].name = "x"  # type: ignore[misc]
    for model, name in (
        (config.order, "seed"),
        (config.prefetch, "batches"),
        (config.source, "limit"),
        (config.errors, "quarantine"),
    ):
        with pytest.raises(ValidationError):
            setattr(model, name, 1)
    with pytest.raises(ValidationError):
        setattr(config.stages[1].args, "size", 3)  # noqa: B010
    assert isinstance(config.stages, tuple)


def test_positional_arguments() -> None:
    base = Pipeline.files("data").read().decode()
    args = base.random_resized_crop(30, (0.5, 1.0)).resize(20, "bicubic", False).batch(4, True).config
    assert args.stage("random_resized_crop").args.model_dump()["scale"] == (0.5, 1.0)
    assert args.stage("resize").args.model_dump(include={"size", "interpolation", "antialias"}) == {
        "size": 20,
        "interpolation": "bicubic",
        "antialias": False,
    }
    assert args.stage("batch").args.model_dump()["drop_last"] is True
    with pytest.raises(ConfigError, match="center_crop takes 2 arguments"):
        base.center_crop(1, 2, 3)
    with pytest.raises(ConfigError, match="size given twice"):
        base.center_crop(1, size=3)
    with pytest.raises(AttributeError, match=r"no stage 'resise'.*did you mean 'resize'"):
        base.resise(3)
    with pytest.raises(AttributeError):
        _ = base._repr_html_
    assert {"resize", "batch", "shuffle"} <= set(dir(base))


def test_errors_of_a_pipeline_are_config_errors() -> None:
    for made, said in (
        (Pipeline.files("data").read().decode(), "no `batch`"),
        (Pipeline.files("data").read().batch(0), "greater than 0"),
        (Pipeline.files("data", lable="parent").read().batch(4), "did you mean 'label'"),
        (Pipeline.dataset(3).read().batch(4), "__len__"),
        (Pipeline.files("data").read().batch(4).shuffle("blok"), "'blok'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            _ = made.config
        with pytest.raises(ConfigError):
            loaderkit.build(made)


def test_a_pipeline_shows_itself() -> None:
    made = Pipeline.files("data").named("x").read().batch(4)
    assert repr(made) == "Pipeline('x': files -> read, batch)"


def test_pipelines_copy_and_pickle() -> None:
    import pickle

    made = Pipeline.files("data").read().decode().batch(4)
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.copy(made) == copy.deepcopy(made) == made
    assert pickle.loads(pickle.dumps(made.config)) == made.config
