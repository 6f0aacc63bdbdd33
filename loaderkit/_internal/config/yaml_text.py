"""The text of a config file: YAML with the line of every key, and ${VAR}."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.docinfo import DocInfo
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from loaderkit._internal.config.diagnostics import KeyPath, Problems

YAML_ERRORS = (YAMLError, ValueError, TypeError, LookupError, OverflowError, RecursionError)
"""The errors of ruamel.yaml, and of the functions that it calls for values such as a date."""

_MAX_VALUES = 100_000
_MAX_DEPTH = 64
_CHARACTERS_A_VALUE = 100
_MAX_CHARACTERS = (_MAX_VALUES - 1000) * _CHARACTERS_A_VALUE  # of one value
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")  # of mappings and lists
_WORD = re.compile(r"[\w.+-]+")
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_OLD_BOOLEAN = re.compile("yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_LINE_ENDS = re.compile("[\x85\u2028\u2029\ufeff]")


class _Resolver(VersionedResolver):
    """YAML 1.2, but yes, no, on and off are truth values as they were in YAML 1.1; y and n are texts."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0] and _OLD_BOOLEAN.fullmatch(value):
            return Tag(suffix="tag:yaml.org,2002:bool")
        return super().resolve(kind, value, implicit)


class _Representer(SafeRepresenter):
    """Writes in double quotes two kinds of text: one with a line end of Unicode, which YAML folds anywhere else, and
    one that begins with a question mark or colon, which would begin a key or value in a list or mapping on one line."""

    def represent_str(self, data: str) -> Any:
        is_quoted = data.startswith(("?", ":")) or _LINE_ENDS.search(data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if is_quoted else None)


_Representer.add_representer(str, _Representer.represent_str)


def _yaml() -> YAML:
    """Reads and writes plain values only: a tag that names a Python object is an error."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Representer = _Resolver, _Representer
    yaml.composer.warn_double_anchors = False
    yaml.doc_infos.append(DocInfo())  # `load` does that itself; to compose a document with a directive needs it, too
    return yaml


def from_yaml(text: str) -> Any:
    """The value of a YAML document. Raises one of YAML_ERRORS."""
    return _yaml().load(text)


def compose(text: str) -> Node | None:
    """The nodes of a YAML document, with their marks. Raises one of YAML_ERRORS."""
    node: Node | None = _yaml().compose(text)
    return node


def to_yaml(value: Any, *, flow: bool | None = None, width: int = 100) -> str:
    """The YAML text of a plain value. `flow`: whether it is written in braces and brackets; None means only its
    innermost mappings and lists."""
    yaml = _yaml()
    yaml.default_flow_style, yaml.width = flow, width
    yaml.representer.sort_base_mapping_type_on_output = False
    file = StringIO()
    yaml.dump(value, file)
    return file.getvalue()


def read_yaml(text: str, problems: Problems) -> Any:
    """The value of a config file. `problems` gets the line of each key and the errors; None if it is not YAML."""
    yaml = _yaml()
    try:
        constructor, _ = yaml.get_constructor_parser(text)
        root = constructor.composer.get_single_node()
        return None if root is None else _Values(constructor, problems).build(root, ())
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.error((), f"not valid YAML: {error.reason} ({chr(error.character)!r})", line=line)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        if "alias" in f"{problem} {getattr(error, 'context', '')}":
            problem += "; a value that begins with * is put in quotes, as in '**/*.jpg'"
        problems.error((), f"not valid YAML: {problem}", line=mark.line + 1 if mark is not None else None)
    except RecursionError:
        problems.error((), "not valid YAML: nested too deeply", line=yaml.reader.line + 1)
    return None


class _Values:
    """Builds values from nodes and counts them. An alias counts each time, so that a small file cannot take much memory;
    ruamel.yaml's own constructors would expand merges of merges before they could be counted."""

    def __init__(self, constructor: Any, problems: Problems) -> None:
        self._constructor = constructor
        self._problems = problems
        self._num_values = 0

    def build(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, ScalarNode) and len(node.value) > _MAX_CHARACTERS:
            problem = f"a value of {len(node.value)} characters; at most {_MAX_CHARACTERS} are read"
            raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        self._num_values += 1 + len(node.value) // _CHARACTERS_A_VALUE
        if self._num_values > _MAX_VALUES or len(path) > _MAX_DEPTH:
            raise YAMLError(f"more than {_MAX_VALUES} values: aliases that repeat one another?")
        self._problems.lines.setdefault(path, node.start_mark.line + 1)
        if not isinstance(node, ScalarNode) and str(node.tag) not in _PLAIN_TAGS:
            raise MarkedYAMLError(problem=f"the tag {node.tag} is of no plain value", problem_mark=node.start_mark)
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.build(item, (*path, number)) for number, item in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        inherited: dict[str, Any] = {}
        mapping: dict[str, Any] = {}
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
            if key_node.tag == _MERGE:
                inherited = self._merged(value_node, path) | inherited
                self._num_values += len(inherited)  # a chain of merges copies them each time
                continue
            line = key_node.start_mark.line + 1
            key = self.build(key_node, (*path, ""))
            if not isinstance(key, str):
                self._problems.error(path, f"the key {key!r} is not text", line=line)
                continue
            self._problems.lines[(*path, key)] = line
            if key in mapping:
                self._problems.error((*path, key), "this key stands here twice", line=line)
            mapping[key] = self.build(value_node, (*path, key))
        return inherited | mapping

    def _merged(self, node: Node, path: KeyPath) -> dict[str, Any]:
        """The mapping that `<<` names, or the mappings, of which the first one wins."""
        merged: dict[str, Any] = {}
        for source in reversed(node.value) if isinstance(node, SequenceNode) else [node]:
            if not isinstance(source, MappingNode):
                raise MarkedYAMLError(problem="`<<` merges mappings only", problem_mark=source.start_mark)
            merged |= self.build(source, path)
        return merged

    def _scalar(self, node: Node) -> Any:
        try:
            return self._constructor.construct_object(node, deep=True)
        except (ValueError, TypeError, LookupError, OverflowError) as error:  # for example a 13th month
            problem = f"{str(node.value)!r} is no value of its kind ({type(error).__name__}: {error})"
            raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def expand_variables(
    value: Any, path: KeyPath, problems: Problems, *, is_left: Callable[[KeyPath], bool] | None = None
) -> Any:
    """Replace environment variables: ${VAR}, ${VAR:-default}; $${ stands for ${ itself. Containers where `is_left` are left."""
    if isinstance(value, str):
        return _expand_text(value, path, problems)
    if is_left is not None and is_left(path):
        return value
    if isinstance(value, dict):
        return {key: expand_variables(item, (*path, key), problems, is_left=is_left) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, (*path, place), problems, is_left=is_left) for place, item in enumerate(value)]
    return value


def _expand_text(text: str, path: KeyPath, problems: Problems) -> Any:
    missing: list[str] = []

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        default: str | None = match[2]
        value = os.environ.get(match[1], default)
        if value is None:
            missing.append(match[1])
        return value or ""

    expanded = _VARIABLE.sub(replacement, text)
    if missing:
        hint = f"set it, or write ${{{missing[0]}:-default}}"
        message = f"the environment has no variable {' and no '.join(missing)}: {hint}"
        problems.error(path, message, settles=True)
    if not _VARIABLE.fullmatch(text) or not _WORD.fullmatch(expanded):
        return expanded
    # A value that is one variable and nothing else is a number or a truth value where one is expected.
    problems.texts[path] = expanded
    try:
        value = from_yaml(expanded)
    except YAML_ERRORS:
        return expanded
    return value if isinstance(value, (bool, int, float)) else expanded
