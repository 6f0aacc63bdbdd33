"""Which Arrow files are the data of one data set of datasets, and not what it has cached beside them since, or another split.

save_to_disk    [dataset_dict.json, train/] state.json, data-00000-of-00002.arrow, cache-<hash>.arrow, ...
the cache       dataset_info.json, imdb-train.arrow or imdb-train-00000-of-00002.arrow, cache-<hash>.arrow, ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import ConfigError, SourceError
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.listing import extension_of, stat_all
from loaderkit.sources.patterns import Patterns, expand_braces

STATE, SPLITS = "state.json", "dataset_dict.json"
_INFO = "dataset_info.json"
_MOST_STATE = 16 << 20  # bytes
_OF_CACHE = re.compile(r"((?!cache-)[^/]+?-([^-/]+))(-\d{5}-of-\d{5})?\.arrow")
_NUM_THREADS = 16


def own_data(
    connector: Connector,
    infos: list[ObjectInfo],
    patterns: Patterns,
    root: str,
    found_bad: BadShards,
    *,
    also_in: Iterable[str] = (),
) -> list[ObjectInfo]:
    """Of the files that match, all but the copies that `datasets` has cached; one that a pattern names stays. `also_in`: other
    folders ("", "train/") that may be of a data set. Files that are named by a data set and missing are told to `found_bad`.

    Raises ConfigError if a glob matches several splits of one data set, SourceError if the rows of one are not those of its
    files, and what the connector raises.
    """
    arrow = {info.key for info in infos if extension_of(info.key).lower() == "arrow"}
    folders = {*map(_folder_of, arrow), *also_in}
    if not folders:
        return infos
    names = [folder + name for folder in folders for name in (STATE, _INFO)]
    names += {_folder_of(folder[:-1]) + SPLITS for folder in folders if folder}
    marks = {info.key: info for info in stat_all(connector, names, _NUM_THREADS, lambda name: True)}
    globs = [text for text in chain.from_iterable(map(expand_braces, patterns.written)) if not patterns.is_name(text)]
    meant = [Patterns(text) for text in globs if _name_of(text).startswith("cache-")]
    left = {*arrow}
    for folder in sorted(folders):
        inside = {key for key in arrow if _folder_of(key) == folder}
        data = _data_of(connector, marks[folder + STATE], inside) if folder + STATE in marks else None
        others = (
            {key for key in inside if _name_of(key).startswith("cache-")} if folder + _INFO in marks else set[str]()
        )
        if data is not None:
            others = inside - data
            for key in sorted(key for key in data - inside if patterns.matches(key) and not patterns.is_name(key)):
                error = SourceError(
                    f"{connector.describe(folder + STATE)} names {_name_of(key)!r}, which is not there: the folder is not whole"
                )
                found_bad.leave_out(key, connector.describe(key), error)
        left -= {key for key in others if not patterns.is_name(key) and not any(one.matches(key) for one in meant)}
    for text in globs if marks else ():
        _refuse_several(Patterns(text), left, marks, root)
    return [info for info in infos if info.key in left or info.key not in arrow]


def _data_of(connector: Connector, state: ObjectInfo, inside: set[str]) -> set[str] | None:
    """The keys of a data set's files, by its state; None if this is another program's. Raises SourceError if those `inside` do
    not have the data set's rows."""
    text = bytearray(min(state.size, _MOST_STATE))
    connector.read_into(state.key, 0, memoryview(text), etag=state.etag)
    try:
        values = json.loads(text)
        data = {_folder_of(state.key) + file["filename"] for file in values["_data_files"]}
        is_mapped = bool(values.get("_indices_data_files") or values.get("_indices_files"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if is_mapped and data & inside:
        raise SourceError(
            f"{connector.describe(state.key)} names indices: which rows of its files are the data set's, and in which order. "
            "kind: tokens does not apply them: read it by kind: huggingface, or save it again after `flatten_indices()`"
        )
    return data


def _refuse_several(glob: Patterns, keys: set[str], marks: dict[str, ObjectInfo], root: str) -> None:
    """Raise ConfigError if a glob matches several splits of one data set."""
    splits: dict[str, dict[str, str]] = {}  # data set -> split -> its files, or their folder
    for key in filter(glob.matches, sorted(keys)):
        folder, name = _folder_of(key), _name_of(key)
        above = _folder_of(folder[:-1])
        if folder and above + SPLITS in marks:
            splits.setdefault(above, {})[folder[len(above) : -1]] = folder[:-1]
        elif folder + _INFO in marks and folder + STATE not in marks and (match := _OF_CACHE.fullmatch(name)):
            splits.setdefault(folder, {})[match[2]] = f"{folder}{match[1]}{'-*' if match[3] else ''}.arrow"
    for found in splits.values():
        if len(found) > 1:
            raise several_splits(found, root)


def several_splits(found: dict[str, str], root: str) -> ConfigError:
    """The error of a folder `root` with splits, whose folders or files are given."""
    example = found.get("train") or next(iter(found.values()), "train")
    return ConfigError(
        f"source.url: {root!r} has the splits {', '.join(found)} of one data set: name the files of one, as in "
        f"url: {root.rstrip('/')}/{example}"
    )


def _folder_of(key: str) -> str:
    """The folder of a key, with a slash at its end; "" of one without."""
    return key[: key.rfind("/") + 1]


def _name_of(key: str) -> str:
    return key[key.rfind("/") + 1 :]
