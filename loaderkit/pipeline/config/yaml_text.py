"""The text of a pipeline file: YAML with the line of every key, and ${VAR}."""

from __future__ import annotations

import os
import re
from typing import Any

import yaml

from loaderkit.pipeline.config.diagnostics import KeyPath, Problems

_MAX_NODES = 100_000
_NO_VALUE = (ValueError, TypeError, KeyError, OverflowError)  # what PyYAML lets through of what it calls
_WORD = re.compile(r"[\w.+-]+")
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


def read_yaml(text: str, reader: Problems) -> Any:
    """The values of a YAML document; `reader` learns the lines of keys, and of keys that stand twice."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reader.complain((), f"not valid YAML: {error.reason} ({chr(error.character)!r})", line=line)
        return None
    num_nodes = 0

    def build(node: yaml.Node, path: KeyPath) -> Any:
        nonlocal num_nodes
        num_nodes += 1
        if num_nodes > _MAX_NODES or len(path) > 64:
            raise yaml.YAMLError(f"more than {_MAX_NODES} values: aliases that repeat one another?")
        reader.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            own = len(node.value) - sum(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value)
            loader.flatten_mapping(node)  # what `<<` brings in now stands first, and gives way
            mapping: dict[Any, Any] = {}
            own_keys: set[Any] = set()
            for place, (key_node, value_node) in enumerate(node.value):
                is_merged = place < len(node.value) - own
                key = _value_of(key_node, loader)
                line = key_node.start_mark.line + 1
                reader.lines[(*path, str(key))] = line
                if not isinstance(key, str):
                    reader.complain(path, f"the key {key!r} is not text", line=line)
                    continue
                if key in own_keys:
                    reader.complain((*path, key), "this key stands here twice", line=line)
                if not is_merged:
                    own_keys.add(key)
                mapping[key] = build(value_node, (*path, str(key)))
            return mapping
        if isinstance(node, yaml.SequenceNode):
            return [build(item, (*path, number)) for number, item in enumerate(node.value)]
        return _value_of(node, loader)

    try:
        root = loader.get_single_node()
        return build(root, ()) if root is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        reader.complain((), f"not valid YAML: {problem}", line=mark.line + 1 if mark is not None else None)
        return None
    except RecursionError:
        reader.complain((), "not valid YAML: nested too deeply", line=loader.line + 1)
        return None
    finally:
        loader.dispose()


def _value_of(node: yaml.Node, loader: yaml.SafeLoader) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except _NO_VALUE as error:  # such as the 13th month
        problem = f"{str(node.value)!r} is no value of its kind ({type(error).__name__}: {error})"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error


def expand_variables(value: Any, path: KeyPath, reader: Problems) -> Any:
    """Put in environment variables: ${VAR}, ${VAR:-default}; $${ stands for ${ itself."""
    if isinstance(value, str):
        missing: list[str] = []

        def put_in(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            default: str | None = match[2]
            found = os.environ.get(match[1], default)
            if found is None:
                missing.append(match[1])
            return found or ""

        expanded = _VARIABLE.sub(put_in, value)
        if missing:
            hint = f"set it, or write ${{{missing[0]}:-default}}"
            message = f"the environment has no variable {' and no '.join(missing)}: {hint}"
            reader.complain(path, message, settles=True)
        if not _VARIABLE.fullmatch(value) or not _WORD.fullmatch(expanded):
            return expanded
        # A value that is one variable and nothing else is a number or a truth value where one is expected.
        reader.texts[path] = expanded
        try:
            parsed = yaml.safe_load(expanded)
        except (yaml.YAMLError, *_NO_VALUE):
            return expanded
        return parsed if isinstance(parsed, (bool, int, float)) else expanded
    if isinstance(value, dict):
        return {key: expand_variables(item, (*path, key), reader) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, (*path, number), reader) for number, item in enumerate(value)]
    return value
