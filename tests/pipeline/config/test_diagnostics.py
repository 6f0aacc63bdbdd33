"""What is wrong with a description is named: file, line, key, what was expected, and the nearest right name."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from config_cases import MINIMAL

import loaderkit
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.diagnostics import Problems
from loaderkit.pipeline.config.parsing import load_yaml, parse
from loaderkit.pipeline.config.yaml_text import from_yaml, read_yaml, to_yaml

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
source: {kind: dataset, object: "config_cases:Letters"}
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
  object: "config_cases:Letters"
  fields: [x, y, x]  # <<
stages: [read, batch: {size: 4}]
""",
        "source.fields",
        ["expected distinct names", "'y'"],
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


def test_invalid_yaml(write: Callable[[str], Path]) -> None:
    path = write("source: {kind: files\nstages: [read\n")
    with pytest.raises(ConfigError, match=r"line \d+: not valid YAML") as caught:
        load_yaml(path)
    assert str(path) in str(caught.value)
    for text in ("\tsource: x\n", "a: b: c\n", "x: !!python/name:os.system ''\n", "--- a\n--- b\n", "x: *nowhere\n"):
        with pytest.raises(ConfigError, match="not valid YAML"):
            load_yaml(write(text))


def test_truth_values_and_merges_are_those_of_yaml_1_1(write: Callable[[str], Path]) -> None:
    problems = Problems(None)
    text = "a: [yes, No, ON, off, yEs, y]\nb: {<<: {k: 1, m: 1}, <<: {k: 2, n: 2}, n: 3}\n"
    value = read_yaml(text, problems)
    assert value["a"] == [True, False, True, False, "yEs", "y"]
    assert value["b"] == {"k": 1, "m": 1, "n": 3}
    for directive in ("%YAML 1.1", "%YAML 1.2", "%TAG !e! tag:example.com,2000:"):
        assert load_yaml(write(f"{directive}\n---\n{MINIMAL}")) == load_yaml(write(MINIMAL))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("version: 1\nname: a\0b\n", 2, "special characters are not allowed ('\\x00')"),
        ("version: 1\n[1, 2]: x\n", 2, "the key [1, 2] is not text"),
        ("version: 1\n? {a: b}\n: x\n", 2, "the key {'a': 'b'} is not text"),
        ("version: 1\nname: " + "[" * 3000 + "]" * 3000 + "\n", 2, "nested too deeply"),
        ("version: 1\nname: 2024-13-45\n", 2, "'2024-13-45' is no value of its kind"),
        ("version: 1\n!!int x: y\n", 2, "'x' is no value of its kind"),
        ("version: 1\nname: !!int \n", 2, "'' is no value of its kind"),
        ("version: 1\nprefetch: !!python/object:os.system {}\n", 2, "is of no plain value"),
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
    "wide merges": "a0: &a0 {k: v}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 2000)}]}}\n" for i in range(1, 4)),
    "chain of merges": "a0: &a0 {k: v}\n"
    + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: v}}\n" for i in range(1, 2000)),
    "merge of itself": "a: &a {<<: *a}\n",
    "key": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n? *a{i}\n: x\n" for i in range(1, 9)),
    "long text": f"a: &a {'x' * 50_000}\nb: [{','.join(['*a'] * 5000)}]\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name: str, write: Callable[[str], Path]) -> None:
    path = write(BOMBS[name] + MINIMAL)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"not valid YAML.*(aliases|values|deep)"):
            load_yaml(path)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


def test_values_as_yaml_1_2_has_them_and_yes_and_no() -> None:
    text = "[yes, Off, y, n, 010, 0o17, 1e3, -.5, 1:30, 2024-01-02, ~, 'no']"
    assert from_yaml(text) == [True, False, "y", "n", 10, 15, 1000.0, -0.5, "1:30", date(2024, 1, 2), None, "no"]
    words = ["yes", "NO", "on", "off", "y", "010", "1e3", "1:30", "2024-01-02", "a\u2028b", "a\nb", "", "~", "-_"]
    assert from_yaml(to_yaml(dict.fromkeys(words, words))) == dict.fromkeys(words, words)
