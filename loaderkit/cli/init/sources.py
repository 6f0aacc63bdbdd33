"""Which source reads what lies at a place: by names, and by the first bytes of a few files."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from loaderkit.cli.init.arrays import hdf5_source, npy_source, zarr_source
from loaderkit.cli.init.files import files_source, joined_source
from loaderkit.cli.init.kinds import LABELLED, OF_FILES, FoundSource, by_kind, in_braces, usual_names
from loaderkit.cli.init.labels import label_table
from loaderkit.cli.init.place import DataPlace, common_folder, without_other_splits
from loaderkit.errors import ConfigError
from loaderkit.sources.listing import extension_of, said_counts
from loaderkit.sources.patterns import is_hidden

_NOUNS = {
    "tar": "tar shards",
    "parquet": "Parquet files",
    "lines": "files of lines",
    "tfrecord": "TFRecord files",
    "mds": "MDS shards",
    "huggingface": "Arrow files",
    "tokens": ".bin files",
}
_MOST_BEGIN = 64 << 10
_CACHED_SPLIT = re.compile(r"[^/]+?-([^-]+)(?:-\d{5}-of-\d{5})?\.arrow")
_ADVICE = (  # for these extensions, what to do
    (
        ("bin", ""),
        "raw numbers do not say their type: write `source: {kind: tokens, url: ..., dtype: uint16, end: 0}` for documents, or "
        "`{kind: array, url: ..., dtype: uint16, shape: [N]}` for records; Megatron's .bin needs its .idx",
    ),
    (
        ("gz", "zst", "tgz", "zip", "xz", "bz2"),
        "compressed files have no random access: unpack them, or read them by kind: iterable (docs/guide/iterables.md)",
    ),
    (("csv", "tsv"), "tables of text are read as Parquet: convert them (docs/guide/parquet.md)"),
)


def find_source(place: DataPlace) -> FoundSource:
    """Raises ConfigError for what cannot be told, which says what was found and what to write."""
    found = _found(place)
    return replace(found, section=_literal(found.section))


def _literal(value: Any) -> Any:
    """The value, in which ${ is part of a name and no variable."""
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    return value.replace("${", "$${") if isinstance(value, str) else value


def _found(place: DataPlace) -> FoundSource:
    if (stores := zarr_source(place)) is not None:
        return stores
    kinds = by_kind(place)
    if kinds and kinds.keys() <= OF_FILES and (joined := joined_source(place)) is not None:
        return joined
    return _of_kind(place, *_only(place, kinds)) if kinds else _by_content(place)


def _of_kind(place: DataPlace, kind: str, keys: list[str]) -> FoundSource:
    if kind == "arrays" and (numbers := npy_source(place, keys)) is not None:
        return numbers
    if kind in OF_FILES:
        return files_source(place, kind, keys)
    if kind in ("mds", "huggingface"):
        return _described(place, kind, keys)
    return hdf5_source(place, keys) if kind == "hdf5" else _shards(place, kind, keys)


def _only(place: DataPlace, kinds: dict[str, list[str]]) -> tuple[str, list[str]]:
    """The one kind and its keys. JSON Lines beside pictures may be their labels."""
    if "lines" in kinds and len(kinds) == 2 and (labelled := [*(kinds.keys() & LABELLED)]):
        folder, names, _, _ = without_other_splits(kinds[labelled[0]])
        if label_table(place, folder, names) is not None:
            return labelled[0], kinds[labelled[0]]
    if len(kinds) == 1:
        return next(iter(kinds.items()))
    found = " and ".join(f"{len(keys):,} of {kind} ({keys[0]})" for kind, keys in kinds.items())
    folder = common_folder(next(iter(kinds.values()))) or "FOLDER/"
    raise ConfigError(
        f"{place.url} holds several kinds, {found}: name the folder of one of them, as in "
        f"`loaderkit init {place.url.rstrip('/')}/{folder.rstrip('/')}`, or mix them by `sources` (docs/guide/mixing.md)"
    )


def _shards(place: DataPlace, kind: str, keys: list[str]) -> FoundSource:
    """Files that hold samples one behind another."""
    folder, names, begin, notes = without_other_splits(keys)
    section: dict[str, Any] = {"kind": kind, "url": place.under(folder)}
    if kind != "tokens" and not place.is_file:
        deep = "**/" if any("/" in name for name in names) else ""
        ending = ".tfrec*" if kind == "tfrecord" else in_braces({name[name.rfind(".") :] for name in names})
        if (include := f"{deep}{begin}*{ending}") != usual_names()[kind].written[0]:
            section["include"] = include
    return FoundSource(section, f"samples in {_NOUNS[kind]}", notes, packs=kind == "tokens")


def _described(place: DataPlace, kind: str, keys: list[str]) -> FoundSource:
    """Shards that a JSON file beside them describes."""
    marks = ("index.json",) if kind == "mds" else ("state.json", "dataset_info.json")
    names = {info.key for info in place.infos}
    folders = sorted({key[: key.rfind("/") + 1] for key in keys})
    folders = [folder for folder in folders if any(folder + mark in names for mark in marks)]
    if not folders:
        where = place.connector.describe(keys[0])
        raise ConfigError(f"{where} has no {' or '.join(marks)} beside it: name the folder that has both")
    trains = [folder for folder in folders if f"/{folder}".endswith("/train/")]
    chosen = folders if len(folders) == 1 else trains
    if len(chosen) != 1:
        raise ConfigError(f"{place.url} has several data sets, {', '.join(folders[:5])}: name the folder of one")
    folder, others = chosen[0], ", ".join(one.rstrip("/") for one in folders if one != chosen[0])
    notes = (f"only {folder.rstrip('/')}; there are others as well: {others}",) if others else ()
    section: dict[str, Any] = {"kind": kind, "url": place.under(folder)}
    if kind == "huggingface" and f"{folder}state.json" not in names:  # the cache, with splits in one folder
        found = (_CACHED_SPLIT.fullmatch(key.removeprefix(folder)) for key in keys)
        splits = {match[1] for match in found if match and not match[0].startswith("cache-")}
        if len(splits) > 1 and "train" not in splits:
            raise ConfigError(
                f"{place.under(folder)} has several splits: name one by `split`, of {', '.join(sorted(splits))}"
            )
        if len(splits) > 1:
            section["split"] = "train"
    return FoundSource(section, f"samples in {_NOUNS[kind]}", notes)


def _by_content(place: DataPlace) -> FoundSource:
    """Lines in .txt and .json. Raises ConfigError for all else, as no name says what it is."""
    keys = [info.key for info in place.infos if not is_hidden(info.key)]
    counts = Counter(extension_of(key).lower() for key in keys)
    if {*counts} in ({"json"}, {"txt"}):
        (ending,) = counts
        if ending == "json" and not _is_object(place.begin(keys[0], _MOST_BEGIN).partition(b"\n")[0]):
            raise ConfigError(
                f"{place.connector.describe(keys[0])} is one JSON document, not one object a line: write it as JSON Lines "
                "(.jsonl), or read it by a function (docs/guide/functions.md)"
            )
        section = {"kind": "lines", "url": place.url} | ({"format": "text"} if ending == "txt" else {})
        if not place.is_file and (ending == "json" or any("/" in key for key in keys)):
            section["include"] = f"{'**/' if any('/' in key for key in keys) else ''}*.{ending}"
        return FoundSource(section, "samples in files of lines")
    advice = (text for extensions, text in _ADVICE if any(counts[extension] for extension in extensions))
    otherwise = "no file has a name that says its kind; docs/guide/sources.md says what can be read"
    found = said_counts(counts) if keys else "nothing but hidden files"
    raise ConfigError(f"{place.url} holds {found}: {next(advice, otherwise)}")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
