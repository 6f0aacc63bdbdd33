"""`loaderkit-state.json`: makes one checkpoint of several safetensors files. It names them, and holds what they cannot hold.

The files of a part of the state have the part's own names ("weight" in model.safetensors for "model.weight"), so that other
programs load them. Here are the prefixes of names, names of tied tensors, plain values, and the paths in the nested state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loaderkit.checkpoint.formats.plain_json import decode
from loaderkit.errors import FormatError

STATE = "loaderkit-state.json"
CONFIG = "config.json"
_VERSION = 1
MODEL_CONFIG = "loaderkit.model_config"
"""The plain value with the model's config.json."""


@dataclass(frozen=True)
class TensorsFile:
    """A safetensors file: `prefix` begins the names of its tensors in the state, `names` are those in the file.

    With `index`, that index names the file.
    """

    prefix: str
    names: list[str]
    num_bytes: int
    index: str = ""


@dataclass(frozen=True)
class StateFile:
    """`files` by name; `values` as `plain_json.encode` gives them; `aliases` map a name to the name of the same tensor.
    `export` is for an export: what it was made of and how, and its error."""

    files: dict[str, TensorsFile]
    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    paths: dict[str, list[str | int]] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The bytes of the file."""
        files = {name: vars(file) for name, file in self.files.items()}
        return json.dumps({"version": _VERSION, **vars(self), "files": files}).encode()

    def path_of(self, name: str, prefix: str = "") -> tuple[str | int, ...]:
        """The path of a name: the one it was given, else its part of the state and the rest."""
        if name in self.paths:
            return tuple(self.paths[name])
        return (prefix[:-1], name[len(prefix) :]) if prefix else (name,)


def read_state(data: bytes) -> StateFile:
    """What a file of this kind holds. Raises FormatError."""
    try:
        fields = json.loads(data)
        if fields["version"] != _VERSION:
            raise ValueError(f"version {fields['version']!r}, and this version of loaderkit knows {_VERSION}")
        files = {name: TensorsFile(**item) for name, item in fields["files"].items()}
        state = StateFile(
            files, **{name: fields[name] for name in ("values", "aliases", "paths")}, export=fields.get("export", {})
        )
        _check(state)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"it is no description of a checkpoint: {error!r:.200}") from None
    return state


def _check(state: StateFile) -> None:
    """Raises TypeError, ValueError."""
    for name, file in state.files.items():
        if not name or "/" in name or "\\" in name or name in (".", "..") or not name.endswith(".safetensors"):
            raise ValueError(f"{name!r} is no name of a file beside it")
        texts = [file.prefix, file.index, *file.names] if isinstance(file.names, list) else [None]
        if not all(isinstance(text, str) for text in texts) or type(file.num_bytes) is not int or file.num_bytes < 0:
            raise TypeError(f"what it says of {name!r}")
        if file.index and ("/" in file.index or not file.index.endswith(".index.json")):
            raise ValueError(f"{file.index!r} is no name of an index beside it")
    tables = (state.values, state.aliases, state.paths, state.export)
    if not all(isinstance(table, dict) for table in tables) or not all(
        isinstance(n, str) for n in state.aliases.values()
    ):
        raise TypeError("its values, aliases and paths are no tables")
    for path in state.paths.values():
        if not isinstance(path, list) or not path or not all(type(key) in (str, int) for key in path):
            raise TypeError(f"the path {path!r:.50}")


def companions_of(state: StateFile) -> dict[str, bytes]:
    """The files beside it that Hugging Face's loaders look for, by name: an index for a part of several files, and the
    model's config.json. They can be made from this file alone, so they are written again after a crash."""
    companions: dict[str, bytes] = {}
    weights: dict[str, dict[str, str]] = {}
    sizes: dict[str, int] = {}
    for name, file in state.files.items():
        if file.index:
            weights.setdefault(file.index, {}).update(dict.fromkeys(file.names, name))
            sizes[file.index] = sizes.get(file.index, 0) + file.num_bytes
    for index, weight_map in weights.items():
        content = {"metadata": {"total_size": sizes[index]}, "weight_map": weight_map}
        companions[index] = json.dumps(content, indent=2).encode() + b"\n"
    config = state.values.get(MODEL_CONFIG)
    if isinstance(config, str):
        companions[CONFIG] = config.encode()
    return companions


def decoded_values(state: StateFile) -> dict[str, Any]:
    """The plain values by name. Raises FormatError."""
    return {name: decode(value) for name, value in state.values.items()}


def names_of(state: StateFile) -> Mapping[str, str]:
    """Name in the state -> its file."""
    return {file.prefix + name: key for key, file in state.files.items() for name in file.names}
