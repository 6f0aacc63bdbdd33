"""`kind: files`: pictures, videos, sounds, scans and arrays, with classes by folders or a table, or several files a sample."""

from __future__ import annotations

import json
import re
from typing import Any

from loaderkit.cli.init.kinds import LABELLED, OF_FILES, FoundSource, in_braces, kind_of
from loaderkit.cli.init.labels import label_table
from loaderkit.cli.init.place import DataPlace, common_folder, without_other_splits
from loaderkit.errors import ConfigError
from loaderkit.sources.fields import FieldMap, last_extension
from loaderkit.sources.patterns import is_hidden

_FIRST_FOLDERS = frozenset({"image", "images", "img", "imgs", "jpegimages", "pictures", "scan", "scans", "volumes"})
_TEXTS = ("txt", "json", "cls", "caption")
_MOST_FIELDS = 5
_SAID = {"jpg": "JPEG", "tif": "TIFF", "nii.gz": "NIfTI", "nii": "NIfTI", "npy": ".npy", "npz": ".npz"}


def files_source(place: DataPlace, kind: str, keys: list[str]) -> FoundSource:
    """Each file is a sample. Raises ConfigError where what the classes are cannot be told."""
    folder, names, _, notes = without_other_splits(keys)
    section: dict[str, Any] = {"kind": "files", "url": place.under(folder)}
    endings = {name[-len(last_extension(name.lower())) :] for name in names}
    noun = " and ".join(sorted({_SAID.get(ending.lower(), ending.upper()) for ending in endings}))
    if place.is_file:
        section = {"kind": "files", "url": place.url.rpartition("/")[0] or ".", "include": names[0]}
    elif kind != "pictures":
        section["include"] = f"**/*.{in_braces(endings)}"
    num_loose = sum("/" not in name for name in names)
    table = label_table(place, folder, names)
    if table is not None and not num_loose:
        raise ConfigError(
            f"{place.url} has class folders and the table {table['file']}, which names the files, too: write `label: "
            f"parent` or `labels: {json.dumps(table)}`, or move the table away"
        )
    if table is not None:  # whose path counts from `url`
        top = common_folder([table["file"], f"{folder}{names[0]}"])
        if top != folder:
            section |= {"url": place.under(top), "include": f"{folder[len(top) :]}**/*.{in_braces(endings)}"}
        section["labels"] = {**table, "file": table["file"][len(top) :]}
    elif kind in LABELLED and not num_loose:
        section["label"] = "parent" if {name.count("/") for name in names} == {1} else "top"
    elif kind in LABELLED and num_loose < len(names):
        loose = next(name for name in names if "/" not in name)
        raise ConfigError(
            f"{place.under(folder)} has {len(names) - num_loose:,} {kind} in folders and {num_loose:,} beside them, such as "
            f"{loose}: name the folder whose folders are the classes, move the others, or write `label: none`"
        )
    return FoundSource(section, f"{noun} files", notes)


def joined_source(place: DataPlace) -> FoundSource | None:
    """Files of one stem are one sample: in several folders, of which one is called as folders of pictures are, or with
    several extensions in one folder; else None. Raises ConfigError for stems without a partner."""
    keys = [info.key for info in place.infos if not is_hidden(info.key)]
    keys = [key for key in keys if kind_of(key) in OF_FILES or last_extension(key.lower()) in _TEXTS]
    folder, names, _, notes = without_other_splits(keys)
    groups: dict[tuple[str, str], dict[str, str]] = {}  # (folder, kind) -> stem -> extension as it is written
    for name in names:
        top, rest = name[: name.rfind("/") + 1], name[name.rfind("/") + 1 :]
        extension = last_extension(rest.lower())
        group = (top, kind_of(rest) or extension)
        groups.setdefault(group, {})[rest[: -len(extension) - 1]] = rest[-len(extension) :]
    tops = {top for top, _ in groups}
    firsts = [
        (top, kind)
        for top, kind in groups
        if kind == "pictures" or (top and kind in ("scans", "arrays"))
        if tops == {""} or top.rstrip("/").lower() in _FIRST_FOLDERS
    ]
    if len(firsts) != 1 or not 1 < len(groups) <= _MOST_FIELDS or len(tops) not in (1, len(groups)):
        return None
    first, stems = firsts[0], groups[firsts[0]].keys()
    partners = [group for group in groups if group != first and 2 * len(groups[group].keys() & stems) > len(stems)]
    if not partners:
        return None
    _refuse_partners(place.under(folder), groups, first, partners)
    fields = {"image": first} | {_field_of(*group, groups[group]): group for group in partners}
    patterns = {name: f"{group[0]}*.{in_braces({*groups[group].values()})}" for name, group in fields.items()}
    second = {name for name, group in fields.items() if group != first and group[1] not in _TEXTS}
    masks = tuple(name for name in fields if name in second and fields[name][1] == "pictures")
    marks = tuple(name for name in fields if name in second and first[1] != "pictures")
    section = {"kind": "files", "url": place.under(folder), "fields": patterns}
    moves = len(masks) == len(partners)
    return FoundSource(section, f"samples of {', '.join(fields)}", notes, masks=masks, marks=marks, moves=moves)


def _refuse_partners(
    url: str,
    groups: dict[tuple[str, str], dict[str, str]],
    first: tuple[str, str],
    partners: list[tuple[str, str]],
) -> None:
    for group in partners:
        if first[1] == "pictures" and group[1] == "arrays":
            raise ConfigError(
                f"{url} has pictures and, of the same names, arrays, and whether these are boxes, masks or targets cannot be "
                "seen: pipelines/detection.yaml shows how they are read"
            )
        if lacking := groups[first].keys() ^ groups[group].keys():
            named = [one[0] or f".{next(iter(groups[one].values()))}" for one in (first, group)]
            raise ConfigError(
                f"{url}: {len(lacking):,} files of {named[0]} and {named[1]} have no partner of the same name, such as "
                f"{min(lacking)}: move these away, or write `fields` with `optional`"
            )


def _field_of(top: str, kind: str, extensions: dict[str, str]) -> str:
    """`mask` for a folder `masks`; of files in one folder what their extension is."""
    if top:
        return re.sub(r"\W", "_", top.rstrip("/").removesuffix("s"))
    return FieldMap(None, {"cls": "label"}).field_of(next(iter(extensions.values())).lower()) or kind
