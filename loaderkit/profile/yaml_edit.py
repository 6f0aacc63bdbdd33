"""Sets values in a pipeline's file and leaves everything else in it as it is, comments and formatting included.

The text is changed at the marks of the parsed nodes. ruamel.yaml's round trip would keep the comments, but not the line
breaks of a list, the spaces within a line, or the indentation of a file that mixes several.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from loaderkit._internal.config.yaml_text import YAML_ERRORS, compose, from_yaml, to_yaml
from loaderkit.diagnosis.verdict import Setting
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import parse
from loaderkit.pipeline.config.stage_parsing import stage_names


def edited(text: str, settings: Sequence[Setting]) -> str:
    """The text of a pipeline's file with these values in it. Raises ConfigError if the file's form does not allow that."""
    for setting in settings:
        text = _set(text, setting.key, setting.value)
    return text


def checked_edit(text: str, settings: Sequence[Setting]) -> str:
    """The same, if it reads as the pipeline with these values. Raises ConfigError, also where it does not."""
    after = edited(text, settings)
    values = {setting.key: setting.value for setting in settings}
    if parse(from_yaml(after)) != parse(from_yaml(text), overrides=values):
        raise ConfigError(f"the file cannot be changed as wanted: set {values} by hand")
    return after


def diff_of(path: Path, settings: Sequence[Setting]) -> str | None:
    """The change as a unified diff that `patch PATH` takes; None where there is nothing to set, or the file cannot hold it."""
    if not settings:
        return None
    before = path.read_text(encoding="utf-8")
    try:
        after = checked_edit(before, settings)
    except (ConfigError, *YAML_ERRORS):
        return None
    # Lines as `patch` has them: str.splitlines would also cut at characters that may be in a comment.
    lines = difflib.unified_diff([*StringIO(before)], [*StringIO(after)], str(path), str(path))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _set(text: str, key: str, value: Any) -> str:
    root = compose(text)
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{key} cannot be set: the file is no mapping")
    section, _, rest = key.partition(".")
    if section != "stages":
        return _set_under(text, root, [section, *rest.split(".")], value)
    name, _, argument = rest.rpartition(".")
    _, stages = _child(root, "stages")
    if not isinstance(stages, SequenceNode):
        raise ConfigError("stages stand in the file as something else than a list")
    number = dict(stage_names(from_yaml(text)["stages"])).get(name)
    if number is None:
        raise ConfigError(f"the file has no stage {name!r}")
    stage = stages.value[number]
    if isinstance(stage, ScalarNode):
        item = f"{stage.value}: {_flow({argument: value})}"
        item = f"{{{item}}}" if stages.flow_style else item
        return _replace(text, stage.start_mark.index, stage.end_mark.index, item)
    return _set_under(text, stage, [stage.value[0][0].value, argument], value)


def _set_under(text: str, mapping: MappingNode, path: list[str], value: Any) -> str:
    """Set a value below a mapping. Mappings that are missing on the path are added."""
    first, *rest = path
    name_node, node = _child(mapping, first)
    if rest and isinstance(node, MappingNode):
        return _set_under(text, node, rest, value)
    if rest and node is not None and node.tag != "tag:yaml.org,2002:null":
        raise ConfigError(f"{first} stands in the file as something else than a mapping")
    for name in reversed(rest):
        value = {name: value}
    if node is None:
        return _insert(text, mapping, first, value)
    begin, end = node.start_mark.index, node.end_mark.index
    if begin == end:  # there is no value, and the mark belongs to the next key
        begin = end = name_node.end_mark.index
        if not text[end:].lstrip().startswith(":"):  # in braces a key may be alone
            return f"{text[:end]}: {_flow(value)}{text[end:]}"
        begin = end = text.index(":", end) + 1
    return _replace(text, begin, end, _flow(value))


def _child(mapping: MappingNode, key: str) -> tuple[Node, Node | None]:
    """The nodes of a key and its value."""
    return next((pair for pair in mapping.value if pair[0].value == key), (mapping, None))


def _insert(text: str, mapping: MappingNode, key: str, value: Any) -> str:
    """Add a key to a mapping: in braces after the last key, else above the first one; a section at the end of the file."""
    item = f"{key}: {_flow(value)}"
    start = mapping.start_mark
    if mapping.flow_style:
        at = mapping.value[-1][1].end_mark.index if mapping.value else start.index + 1
        return text[:at] + (", " if mapping.value else "") + item + text[at:]
    if start.column == 0 and start.index == mapping.value[0][0].start_mark.index:
        return f"{text.rstrip()}\n{item}\n"
    return f"{text[: start.index]}{item}\n{' ' * start.column}{text[start.index :]}"


def _replace(text: str, begin: int, end: int, value: str) -> str:
    space = "" if begin == 0 or text[begin - 1].isspace() or text[begin - 1] in "[{" else " "
    kept = text[begin:end]
    trailing = kept[len(kept.rstrip()) :]  # a block ends where the next key begins
    return f"{text[:begin]}{space}{value}{trailing}{text[end:]}"


def _flow(value: Any) -> str:
    return to_yaml(value, flow=True, width=2**20).removesuffix("\n").removesuffix("\n...")
