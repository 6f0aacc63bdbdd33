"""Values set in a pipeline's file, and everything else in it, comments included, left as it stands.

The text is changed where the parsed nodes say it is: a value is replaced, a key that is not there yet is put in before the
first one of its mapping. Nothing is written that does not read as what was meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.parsing import parse
from loaderkit.profile.report import Setting


def edited(text: str, settings: Sequence[Setting]) -> str:
    """The text of a pipeline's file with these values in it. Raises ConfigError where it cannot be done by changing text."""
    for setting in settings:
        text = _set(text, setting.key, setting.value)
    return text


def diff_of(path: Path, settings: Sequence[Setting]) -> str | None:
    """The change as a unified diff that `patch PATH` takes; None where there is nothing to set, or no text to change."""
    if not settings:
        return None
    before = path.read_text(encoding="utf-8")
    try:
        after = edited(before, settings)
        wanted = parse(yaml.safe_load(before), overrides={setting.key: setting.value for setting in settings})
        if parse(yaml.safe_load(after)) != wanted:
            return None
    except ConfigError:
        return None
    # Lines as `patch` has them: str.splitlines would also cut at characters that may stand in a comment.
    lines = difflib.unified_diff([*StringIO(before)], [*StringIO(after)], str(path), str(path))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _set(text: str, key: str, value: Any) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{key} cannot be set: the file is no mapping")
    section, _, rest = key.partition(".")
    if section == "stages":
        name, _, rest = rest.rpartition(".")
        return _set_in_stage(text, root, name, rest, value)
    return _set_under(text, root, [section, *rest.split(".")], value)


def _set_under(text: str, mapping: yaml.MappingNode, path: list[str], value: Any) -> str:
    """Set a value below a mapping; what is missing on the way to it is made."""
    first, *rest = path
    node = next((child for name, child in mapping.value if name.value == first), None)
    if node is None:
        for name in reversed(rest):
            value = {name: value}
        return _put_in(text, mapping, first, value)
    if not rest:
        return _replace(text, node, _dump(value))
    if isinstance(node, yaml.MappingNode):
        return _set_under(text, node, rest, value)
    if node.tag != "tag:yaml.org,2002:null":
        raise ConfigError(f"{first} stands in the file as something else than a mapping")
    for name in reversed(rest):
        value = {name: value}
    return _replace(text, node, _dump(value))


def _set_in_stage(text: str, root: yaml.MappingNode, stage: str, key: str, value: Any) -> str:
    stages = next((child for name, child in root.value if name.value == "stages"), None)
    if not isinstance(stages, yaml.SequenceNode):
        raise ConfigError("stages stand in the file as something else than a list")
    node = _stage_node(stages, stage)
    if isinstance(node, yaml.ScalarNode):
        item = f"{node.value}: {_dump({key: value})}"
        return _replace(text, node, f"{{{item}}}" if stages.flow_style else item)
    assert isinstance(node, yaml.MappingNode)
    return _set_under(text, node, [node.value[0][0].value, key], value)


def _stage_node(stages: yaml.SequenceNode, name: str) -> yaml.Node:
    """The stage of a name: its own, or its kind, of which a second one is kind-2."""
    counts: dict[str, int] = {}
    for node in stages.value:
        kind, own = node.value, None
        if isinstance(node, yaml.MappingNode):
            kind_node, args = node.value[0]
            kind = kind_node.value
            if isinstance(args, yaml.MappingNode):
                own = next((child.value for key, child in args.value if key.value == "name"), None)
        counts[kind] = counts.get(kind, 0) + 1
        if name == (own or (kind if counts[kind] == 1 else f"{kind}-{counts[kind]}")):
            return node  # type: ignore[no-any-return]
    raise ConfigError(f"the file has no stage {name!r}")


def _put_in(text: str, mapping: yaml.MappingNode, key: str, value: Any) -> str:
    """A key that a mapping has not yet: in braces behind the last one, else above the first one; a section at the end."""
    item = f"{key}: {_dump(value)}"
    if mapping.flow_style:
        at = mapping.value[-1][1].end_mark.index if mapping.value else mapping.start_mark.index + 1
        return text[:at] + (", " if mapping.value else "") + item + text[at:]
    column = mapping.start_mark.column
    if column == 0 and mapping.start_mark.index == mapping.value[0][0].start_mark.index:
        return f"{text.rstrip()}\n{item}\n"
    at = mapping.start_mark.index
    return f"{text[:at]}{item}\n{' ' * column}{text[at:]}"


def _replace(text: str, node: yaml.Node, value: str) -> str:
    begin, end = node.start_mark.index, node.end_mark.index
    space = "" if begin == 0 or text[begin - 1].isspace() or text[begin - 1] in "[{" else " "
    kept = text[begin:end]
    trailing = kept[len(kept.rstrip()) :]  # a block ends where the next key begins
    return f"{text[:begin]}{space}{value}{trailing}{text[end:]}"


def _dump(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
