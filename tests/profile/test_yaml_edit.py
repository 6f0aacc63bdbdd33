"""Values set in a pipeline's file: they read as meant, and nothing else has changed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit import Pipeline
from loaderkit._internal.config.yaml_text import from_yaml
from loaderkit.diagnosis.verdict import Setting
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import parse
from loaderkit.profile.settings_patch import value_of
from loaderkit.profile.yaml_edit import diff_of, edited

BLOCK = """\
# Photographs.
version: 1
source:
  kind: files   # one a sample
  url: /data
stages:
  - read
  # as they are stored
  - decode: {device: cpu}   # cpu
  - call: {function: "profiled_pipelines:step"}
  - call:
      function: "profiled_pipelines:failing"   # the second one
  - resize:
      size: 8
  - batch: {size: 4}
prefetch:   # how far ahead
  batches: 2   # few
  memory: 1GiB
# the end
"""
FLOW = """\
{source: {kind: files, url: /data}, stages: [read, decode, {resize: {size: 8}}, {batch: {size: 4}}]}
"""
BARE = """\
source: {kind: files, url: /data}
stages:
- read
- decode
- batch: {size: 4, name: gather}
prefetch:
"""

SETTINGS = [
    ("prefetch.batches", 8),
    ("prefetch.concurrency", 16),
    ("prefetch.executor", "process"),
    ("prefetch.memory", "3GiB"),
    ("stages.read.workers", 4),
    ("stages.decode.workers", 2),
]


@pytest.mark.parametrize("text", [BLOCK, FLOW, BARE])
@given(chosen=st.lists(st.sampled_from(SETTINGS), unique_by=lambda pair: pair[0], max_size=6))
def test_it_reads_as_meant(text: str, chosen: list[tuple[str, Any]]) -> None:
    after = edited(text, [Setting(key=key, value=value) for key, value in chosen])
    meant = parse(from_yaml(text), overrides=dict(chosen))
    assert parse(from_yaml(after)) == meant


@given(chosen=st.lists(st.sampled_from(SETTINGS), unique_by=lambda pair: pair[0], max_size=6))
def test_comments_stay(chosen: list[tuple[str, Any]]) -> None:
    after = edited(BLOCK, [Setting(key=key, value=value) for key, value in chosen])
    for line in BLOCK.splitlines():
        _, sign, comment = line.partition("#")
        assert f"#{comment}" in after or not sign
    assert len(after.splitlines()) - len(BLOCK.splitlines()) <= len(chosen)


def test_a_stage_is_found_by_its_name() -> None:
    after = from_yaml(edited(BLOCK, [Setting(key="stages.call-2.workers", value=3)]))
    assert after["stages"][3] == {"call": {"workers": 3, "function": "profiled_pipelines:failing"}}
    assert from_yaml(edited(BARE, [Setting(key="stages.gather.workers", value=3)]))["stages"][2] == {
        "batch": {"size": 4, "name": "gather", "workers": 3}
    }


def test_a_missing_section_comes_last() -> None:
    text = "source: {kind: files, url: /data}\nstages: [read, {batch: {size: 4}}]  # two"
    after = edited(text, [Setting(key="prefetch.batches", value=8)])
    assert after == text + "\nprefetch: {batches: 8}\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("- a\n- list\n", "prefetch.batches"),
        ("prefetch: 3\nstages: []\n", "prefetch.batches"),
        ("stages: read\n", "stages.read.workers"),
        (BLOCK, "stages.normalize.workers"),
    ],
)
def test_what_cannot_be_changed_is_refused(text: str, key: str) -> None:
    with pytest.raises(ConfigError):
        edited(text, [Setting(key=key, value=1)])


def test_a_key_without_a_colon_gets_one() -> None:
    text = "{prefetch, source: {kind: files, url: x}, stages: [read, {batch: {size: 4}}]}"
    changed = edited(text, [Setting(key="prefetch.batches", value=8)])
    assert from_yaml(changed) == from_yaml(text) | {"prefetch": {"batches": 8}}


def test_a_diff_names_the_file(tmp_path: Any) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(BLOCK)
    found = diff_of(path, [Setting(key="prefetch.batches", value=8)])
    assert found is not None
    assert found.splitlines()[0] == f"--- {path}"
    assert "-  batches: 2   # few" in found
    assert "+  batches: 8   # few" in found
    assert diff_of(path, []) is None


def test_what_to_yaml_writes_can_be_changed() -> None:
    text = Pipeline.files("/data").read().decode().resize(8).batch(4).to_yaml()
    after = edited(text, [Setting(key=key, value=value) for key, value in SETTINGS])
    assert parse(from_yaml(after)) == parse(from_yaml(text), overrides=dict(SETTINGS))


@pytest.mark.parametrize(
    "text", [FLOW.rstrip(), BLOCK.rstrip(), "source: {kind: files, url: /data}\nstages: [read, {batch: {size: 4}}]"]
)
def test_a_patch_of_a_file_without_an_end_of_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    wanted = [Setting(key="prefetch.executor", value="process"), Setting(key="prefetch.processes", value=3)]
    found = diff_of(path, wanted)
    assert found is not None
    subprocess.run(["patch", "--quiet", str(path)], input=found, text=True, check=True)
    prefetch = parse(from_yaml(path.read_text())).prefetch
    assert (prefetch.executor, prefetch.processes) == ("process", 3)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_patch_of_a_file_with_other_ends_of_lines_in_it(mark: str, tmp_path: Path) -> None:
    """YAML takes them in comments and texts; `patch` knows one end of a line."""
    path = tmp_path / "p.yaml"
    path.write_text(BLOCK.replace("# few", f"# few{mark}"))
    found = diff_of(path, [Setting(key="prefetch.executor", value="inline")])
    assert found is not None
    subprocess.run(["patch", "--quiet", str(path)], input=found, text=True, check=True)
    assert parse(from_yaml(path.read_text())).prefetch.executor == "inline"


class Nameless:
    """An object that no pipeline's file could name."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def test_what_a_stage_has_is_told_beside_an_object_without_a_name() -> None:
    pipeline = Pipeline.dataset([{"x": 1}]).read().call(Nameless(), workers=3).batch(1)
    assert value_of(pipeline.config, "stages.call.workers") == 3
    assert value_of(pipeline.config, "prefetch.memory") == pipeline.config.prefetch.model_dump(mode="json")["memory"]
