"""YAML as pipelines have it: lines of errors, truth values, merges, bombs, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from config_cases import MINIMAL
from memory_peak import forget_peak, peak_bytes

import loaderkit
from loaderkit._internal.config import yaml_text
from loaderkit._internal.config.diagnostics import Problems
from loaderkit._internal.config.yaml_text import from_yaml, read_yaml, to_yaml
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import load_yaml


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
        ("version: 1\nname: " + "[" * 500 + "]" * 500 + "\n", 2, "nested too deeply"),
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
    forget_peak()
    before_bytes = peak_bytes("VmRSS")
    with pytest.raises(ConfigError, match=r"not valid YAML.*(aliases|values|deep)"):
        load_yaml(path)
    assert peak_bytes("VmHWM") - before_bytes < 200e6


def test_a_long_text_is_named_as_what_it_is(write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "_MAX_CHARACTERS", 99_000)
    with pytest.raises(ConfigError, match=r"line 1: not valid YAML: a value of 100000 characters; at most 99000"):
        load_yaml(write(f"name: {'x' * 100_000}\n{MINIMAL}"))


def test_values_as_yaml_1_2_has_them_and_yes_and_no() -> None:
    text = "[yes, Off, y, n, 010, 0o17, 1e3, -.5, 1:30, 2024-01-02, ~, 'no']"
    assert from_yaml(text) == [True, False, "y", "n", 10, 15, 1000.0, -0.5, "1:30", date(2024, 1, 2), None, "no"]
    words = ["yes", "NO", "on", "off", "y", "010", "1e3", "1:30", "2024-01-02", "a\u2028b", "a\nb", "", "~", "-_"]
    assert from_yaml(to_yaml(dict.fromkeys(words, words))) == dict.fromkeys(words, words)


@pytest.mark.parametrize("text", ["?0", "? x", "?", ":0", ":"])
def test_a_question_mark_or_colon_begins_no_key_or_value(text: str) -> None:
    value = {"a": [text], text: text, "b": [{"c": {"d": {text: text}}}]}
    assert from_yaml(to_yaml(value)) == value
