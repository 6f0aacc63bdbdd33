"""Locates the files of one split, in the layouts that datasets use.

    save_to_disk    [dataset_dict.json, train/] state.json, dataset_info.json, data-00000-of-00002.arrow, ...
    the cache       plain_text/0.0.0/<hash>/ dataset_info.json, imdb-train.arrow or imdb-train-00000-of-00002.arrow, ...

What the JSON files name are objects beside them; nothing is imported or run, and a script beside them is not looked at.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from loaderkit.connectors.base import Connector, ObjectInfo, modified_s_of
from loaderkit.errors import ConfigError, FormatError, ObjectNotFoundError, SourceError
from loaderkit.sources.huggingface.args import HuggingfaceArgs

_MOST_JSON = 64 << 20  # bytes: names of a million classes
_CACHED = re.compile(r"[^/]+/[^/]+/([^/]+/)?dataset_info\.json")  # configuration, version, and mostly a hash
_STATE, _DICT, _INFO = "state.json", "dataset_dict.json", "dataset_info.json"


class Located(NamedTuple):
    """The data files in their order, the files of a mapping of indices, the features as JSON has them, the columns of the
    saved format (None means all), and the expected number of rows (None if that is not known)."""

    files: list[ObjectInfo]
    indices: list[ObjectInfo]
    features: Any
    columns: list[str] | None
    num_rows: int | None


def locate(connector: Connector, args: HuggingfaceArgs) -> Located:
    """Raises SourceError for what is no data set, or has no such split, FormatError for damaged JSON, and what the connector
    raises."""
    if args.name is not None:
        return _in_cache(connector, _cached_folder(connector, args), args.split)
    state = _json_of(connector, _STATE)
    if state is not None:
        split = state.get("_split")
        if args.split is not None and split is not None and args.split != split:
            raise ConfigError(f"source.split: {args.root!r} holds the split {split!r}, not {args.split!r}")
        return _saved(connector, "", state)
    splits = _json_of(connector, _DICT)
    if splits is not None:
        names = splits.get("splits")
        prefix = f"{_chosen_split(args.split, _texts(names, connector, _DICT), args.root)}/"
        state = _json_of(connector, prefix + _STATE)
        if state is None:
            raise SourceError(f"there is no {connector.describe(prefix + _STATE)}: it is no data set that is whole")
        return _saved(connector, prefix, state)
    if _json_of(connector, _INFO) is not None:
        return _in_cache(connector, "", args.split)
    raise SourceError(
        f"{args.root!r} is no data set of datasets: it has neither {_STATE}, {_DICT} nor {_INFO}. Give the folder that "
        "`save_to_disk` wrote; .parquet files are read by kind: parquet"
    )


def _saved(connector: Connector, prefix: str, state: dict[str, Any]) -> Located:
    files = _files_of(connector, prefix, state.get("_data_files"))
    listed = state.get("_indices_data_files") or state.get("_indices_files")
    indices = [] if not listed else _files_of(connector, prefix, listed)
    columns = None if state.get("_output_all_columns") else state.get("_format_columns")
    info = _json_of(connector, prefix + _INFO) or {}
    chosen = None if columns is None else _texts(columns, connector, prefix + _STATE)
    return Located(files, indices, info.get("features"), chosen, None)


def _files_of(connector: Connector, prefix: str, listed: Any) -> list[ObjectInfo]:
    entries = listed if isinstance(listed, list) else [listed]
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    for name in names:
        if not isinstance(name, str) or not name or "/" in name or "\\" in name:
            raise FormatError(
                f"{connector.describe(prefix + _STATE)} names the file {name!r}, which is none beside it: it is damaged"
            )
    return [connector.stat(f"{prefix}{name}") for name in names]


def _cached_folder(connector: Connector, args: HuggingfaceArgs) -> str:
    """The folder of the data set that was prepared last, of those with the configuration."""
    try:
        infos = [info.key for info in connector.list("") if _CACHED.fullmatch(info.key)]
    except ObjectNotFoundError:
        infos = []
    by_config: dict[str, list[str]] = {}
    for key in infos:
        by_config.setdefault(key.partition("/")[0], []).append(key.removesuffix(_INFO))
    if not by_config:
        raise SourceError(
            f"the cache of datasets has no {args.name!r} that is prepared, in {args.root!r}: run `load_dataset` once where "
            "there is a network, or set HF_DATASETS_CACHE"
        )
    if args.config is None and len(by_config) > 1:
        raise ConfigError(f"source.config: {args.root!r} has several, {', '.join(sorted(by_config))}: choose one")
    config = args.config or next(iter(by_config))
    if config not in by_config:
        raise ConfigError(f"source.config: {args.root!r} has no {config!r}, only {', '.join(sorted(by_config))}")
    return max(by_config[config], key=lambda folder: (modified_s_of(connector, folder + _INFO) or 0, folder))


def _in_cache(connector: Connector, folder: str, split: str | None) -> Located:
    info = _json_of(connector, folder + _INFO) or {}
    splits = info.get("splits")
    if not isinstance(splits, dict) or not all(isinstance(one, dict) for one in splits.values()):
        raise FormatError(f"{connector.describe(folder + _INFO)} does not say which splits there are")
    name = _chosen_split(split, list(splits), connector.describe(folder))
    pattern = re.compile(rf"[^/]+-{re.escape(name)}(-\d{{5}}-of-\d{{5}})?\.arrow")
    files = [one for one in connector.list(folder) if pattern.fullmatch(one.key.removeprefix(folder))]
    num = splits[name].get("num_examples")
    if not files:
        raise SourceError(f"there is no .arrow file of the split {name!r} in {connector.describe(folder)}")
    return Located(files, [], info.get("features"), None, num if type(num) is int else None)


def _chosen_split(split: str | None, names: list[str], where: str) -> str:
    if split is None and len(names) == 1:
        split = names[0]
    if split is None:
        raise ConfigError(f"source.split: {where!r} has the splits {', '.join(names)}: choose one")
    if split not in names:
        raise ConfigError(f"source.split: {where!r} has no split {split!r}, only {', '.join(names) or 'none'}")
    return split


def _texts(listed: Any, connector: Connector, key: str) -> list[str]:
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise FormatError(
            f"{connector.describe(key)} is damaged: it has {type(listed).__name__} where names are expected"
        )
    return listed


def _json_of(connector: Connector, key: str) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file."""
    try:
        info = connector.stat(key)
    except ObjectNotFoundError:
        return None
    name = connector.describe(key)
    if info.size > _MOST_JSON:
        raise FormatError(f"{name} has {info.size} bytes, and such a file at most {_MOST_JSON}")
    data = bytearray(info.size)
    connector.read_into(key, 0, memoryview(data), etag=info.etag)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{name} is no object of JSON")
    return value
