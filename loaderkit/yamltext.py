"""The text of a pipeline file: YAML with the line of every key, and ${VAR}."""

from __future__ import annotations

import os
import re
from typing import Any

import yaml

from loaderkit.problems import KeyPath, Problems

_MAX_NODES = 100_000
_WORD = re.compile(r"[\w.+-]+")
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


def read_yaml(text: str, reader: Problems) -> Any:
    """The values of a YAML document; `reader` learns the lines of keys, and of keys that stand twice."""
    loader = yaml.SafeLoader(text)
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
                key = loader.construct_object(key_node, deep=True)
                line = key_node.start_mark.line + 1
                reader.lines[(*path, str(key))] = line
                if not isinstance(key, str):
                    reader.complain(path, f"the key {key!r} is not text", line=line)
                elif key in own_keys:
                    reader.complain((*path, key), "this key stands here twice", line=line)
                if not is_merged:
                    own_keys.add(key)
                mapping[key] = build(value_node, (*path, str(key)))
            return mapping
        if isinstance(node, yaml.SequenceNode):
            return [build(item, (*path, number)) for number, item in enumerate(node.value)]
        return loader.construct_object(node, deep=True)

    try:
        root = loader.get_single_node()
        return build(root, ()) if root is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        reader.complain((), f"not valid YAML: {problem}", line=mark.line + 1 if mark is not None else None)
        return None
    finally:
        loader.dispose()


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
        parsed = yaml.safe_load(expanded)
        return parsed if isinstance(parsed, (bool, int, float)) else expanded
    if isinstance(value, dict):
        return {key: expand_variables(item, (*path, key), reader) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_variables(item, (*path, number), reader) for number, item in enumerate(value)]
    return value
