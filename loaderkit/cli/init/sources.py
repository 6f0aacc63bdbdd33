"""Which source reads what lies at a place: by names, and by the first bytes of a few files."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from loaderkit.cli.init.labels import label_table
from loaderkit.cli.init.place import Place, common_folder, without_other_splits
from loaderkit.errors import ConfigError
from loaderkit.sources.containers.formats import USUAL
from loaderkit.sources.fields import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, FieldMap, last_extension
from loaderkit.sources.formats.npy import parse_npy_header
from loaderkit.sources.listing import extension_of, said_counts
from loaderkit.sources.parquet.source import ParquetArgs
from loaderkit.sources.patterns import Patterns, is_hidden
from loaderkit.sources.serial.lines import LinesArgs
from loaderkit.sources.serial.tfrecord import TfrecordArgs
from loaderkit.sources.tar.source import TarArgs

_PICTURE_FOLDERS = frozenset({"image", "images", "img", "imgs", "jpegimages", "pictures", "scan", "scans", "volumes"})
_FILES = ("pictures", "videos", "sounds", "scans", "arrays")
_LABELLED = ("pictures", "videos", "sounds")
_BESIDE = ("txt", "json", "cls", "caption")
_MOST_BEGIN = 64 << 10
_ZARR = re.compile(r"(?:(.*)/)?(zarr\.json|\.zarray)")
_NOUNS = {
    "tar": "tar shards",
    "parquet": "Parquet files",
    "lines": "files of lines",
    "tfrecord": "TFRecord files",
    "mds": "MDS shards",
    "huggingface": "Arrow files",
    "tokens": ".bin files",
    "zarr": "Zarr stores",
    "hdf5": "HDF5 files",
}
_GUIDE = "docs/guide/sources.md says what can be read"


@dataclass(frozen=True)
class FoundSource:
    """The section `source` without its kind's defaults, what its samples are, in a word or two, and what is to be said."""

    section: dict[str, Any]
    noun: str
    notes: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()  # pictures of class numbers
    marks: tuple[str, ...] = ()  # volumes of class numbers
    moves: bool = True  # False: a field says something of a picture's places, or may
    packs: bool = False  # documents of tokens


@cache
def _usual() -> dict[str, Patterns]:
    """Kind -> its usual names, which its arguments know."""
    lines = [f"*{ending}" for ending in LinesArgs(url="x").also_usual]
    return {
        "tar": Patterns(TarArgs(url="x").include),
        "parquet": Patterns(ParquetArgs(url="x").include),
        "lines": Patterns(lines),
        "tfrecord": Patterns(TfrecordArgs(url="x").usual),
        "hdf5": Patterns([f"*{ending}" for ending in USUAL]),
        "mds": Patterns("*.mds"),
        "huggingface": Patterns("*.arrow"),
    }


def _kind_of(key: str, keys: frozenset[str]) -> str | None:
    """What a file is by its name; None for what lies beside data, or is not known."""
    name = key.rpartition("/")[2].lower()
    extension = last_extension(name)
    if extension in ("idx", "offsets"):  # indexes
        return None
    for kind, patterns in _usual().items():
        if patterns.matches(name):
            return kind
    if extension == "bin":
        return "tokens" if f"{key[:-4]}.idx" in keys else None
    for noun, extensions in zip(_FILES, (IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, AUDIO_EXTENSIONS), strict=False):
        if extension in extensions:
            return noun
    content = FieldMap(None).field_of(extension)
    return "scans" if content == "nii" else "arrays" if content in ("npy", "npz") else None


def find_source(place: Place) -> FoundSource:
    """Raises ConfigError for what cannot be told, which says what was found and what to write."""
    found = _found(place)
    return replace(found, section=_literal(found.section))


def _literal(value: Any) -> Any:
    """The value, in which ${ is part of a name and no variable."""
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    return value.replace("${", "$${") if isinstance(value, str) else value


def _found(place: Place) -> FoundSource:
    every = [info.key for info in place.infos]
    if any(_ZARR.fullmatch(key) for key in every):
        return _zarr(place, every)
    seen = [key for key in every if not is_hidden(key)]
    by_kind: dict[str, list[str]] = {}
    for key in seen:
        if (kind := _kind_of(key, frozenset(seen) if key.endswith(".bin") else frozenset())) is not None:
            by_kind.setdefault(kind, []).append(key)
    if not by_kind:
        return _without_names(place, seen)
    if {*by_kind} <= {*_FILES} and (joined := _joined(place, seen, [*by_kind])) is not None:
        return joined
    if "lines" in by_kind and len(by_kind) == 2 and (kind := next(iter({*by_kind} & {*_LABELLED}), None)):
        folder, names, _, _ = without_other_splits(by_kind[kind])
        if label_table(place, by_kind["lines"], folder, names) is not None:
            del by_kind["lines"]
    if len(by_kind) > 1:
        found = " and ".join(f"{len(keys):,} of {kind} ({keys[0]})" for kind, keys in by_kind.items())
        one = common_folder(next(iter(by_kind.values()))) or "FOLDER/"
        raise ConfigError(
            f"{place.url} holds several kinds, {found}: name the folder of one of them, as in "
            f"`loaderkit init {place.url.rstrip('/')}/{one.rstrip('/')}`, or mix them by `sources` (docs/guide/mixing.md)"
        )
    ((kind, keys),) = by_kind.items()
    if kind in ("mds", "huggingface"):
        return _of_index(place, kind, seen, keys)
    if kind == "arrays" and all(key.lower().endswith(".npy") for key in keys):
        header = parse_npy_header(place.begin(keys[0], _MOST_BEGIN), 1 << 62)
        if place.is_file or (len(header.shape) == 1 and header.dtype.kind in "iu"):
            return _numbers(place, keys, is_tokens=len(header.shape) == 1 and header.dtype.kind in "iu")
    folder, names, begin, note = without_other_splits(keys)
    url, notes = place.under(folder), tuple(filter(None, [note]))
    if kind in _FILES:
        return _files(place, kind, folder, names, seen, notes)
    section: dict[str, Any] = {"kind": kind, "url": url}
    if kind == "hdf5":
        return _containers(place, section, f"{folder}{names[0]}", len(names))
    if kind != "tokens" and not place.is_file:
        endings = sorted({name[name.rfind(".") :] for name in names})
        deep = "**/" if any("/" in name for name in names) else ""
        usual = _usual()["lines" if kind == "lines" else kind].written[0]
        if deep or begin or (kind != "tfrecord" and endings != [usual[1:]]):
            shown = endings[0] if len(endings) == 1 else f"{{{','.join(endings)}}}"
            section["include"] = f"{deep}{begin}*{'.tfrec*' if kind == 'tfrecord' else shown}"
    return FoundSource(section, f"samples in {_NOUNS.get(kind, kind)}", notes, packs=kind == "tokens")


def _without_names(place: Place, keys: list[str]) -> FoundSource:
    """What is told by content: lines in .txt and .json. Raises ConfigError for all else."""
    counts = Counter(extension_of(key).lower() for key in keys)
    for ending in ("json", "txt"):
        names = [key for key in keys if key.lower().endswith(f".{ending}")]
        if names and len(names) == len(keys):
            begin = place.begin(names[0], _MOST_BEGIN)
            if ending == "json" and not _is_line(begin.partition(b"\n")[0]):
                raise ConfigError(
                    f"{place.connector.describe(names[0])} is one JSON document, not one object a line: write it as JSON Lines "
                    "(.jsonl), or read it by a function (docs/guide/functions.md)"
                )
            section: dict[str, Any] = {"kind": "lines", "url": place.url}
            if ending == "txt":
                section["format"] = "text"
            if not place.is_file and (ending == "json" or any("/" in name for name in names)):
                section["include"] = f"{'**/' if any('/' in name for name in names) else ''}*.{ending}"
            return FoundSource(section, "samples in files of lines")
    if any(counts[extension] for extension in ("bin", "")):
        write = (
            "raw numbers do not say their type: write `source: {kind: tokens, url: ..., dtype: uint16, end: 0}` for "
            "documents, or `{kind: array, url: ..., dtype: uint16, shape: [N]}` for records; Megatron's .bin needs its .idx"
        )
    elif counts["gz"] + counts["zst"] + counts["tgz"] + counts["zip"] + counts["xz"] + counts["bz2"]:
        write = "compressed files have no random access: unpack them, or read them by kind: iterable (docs/guide/iterables.md)"
    elif counts["csv"] + counts["tsv"]:
        write = "tables of text are read as Parquet: convert them (docs/guide/parquet.md)"
    else:
        write = f"no file has a name that says its kind; {_GUIDE}"
    raise ConfigError(f"{place.url} holds {said_counts(counts) if keys else 'nothing but hidden files'}: {write}")


def _is_line(begin: bytes) -> bool:
    try:
        return isinstance(json.loads(begin), dict)
    except (ValueError, RecursionError):
        return False


def _files(
    place: Place, kind: str, folder: str, names: list[str], seen: list[str], notes: tuple[str, ...]
) -> FoundSource:
    section: dict[str, Any] = {"kind": "files", "url": place.under(folder)}
    endings = sorted({extension_of(name) for name in names})
    noun = f"{' and '.join(sorted({_said(name) for name in names}))} files"
    if place.is_file:
        section = {"kind": "files", "url": place.url.rpartition("/")[0] or ".", "include": names[0]}
    elif kind != "pictures":
        section["include"] = "**/*" + (f".{endings[0]}" if len(endings) == 1 else f".{{{','.join(endings)}}}")
        if kind == "scans":
            section["include"] = (
                "**/*.{nii,nii.gz}" if len({_said(name) for name in names}) > 1 else f"**/*.{_last(names)}"
            )
    table = label_table(
        place, [key for key in seen if extension_of(key).lower() in ("csv", "tsv", "json", "jsonl")], folder, names
    )
    has_classes = kind in _LABELLED and all("/" in name for name in names)
    if table is not None and has_classes:
        raise ConfigError(
            f"{place.url} has class folders and the table {table['file']}, which names the files as well: write `label: parent` "
            f"or `labels: {json.dumps(table)}`, one of them, or move the table away"
        )
    if table is not None:
        if "/" in table["file"] or folder:  # the table's path counts from `url`
            top = common_folder([table["file"], f"{folder}{names[0]}"])
            section["url"] = place.under(top)
            section["include"] = f"{folder[len(top) :]}{section.get('include', '**/*.' + _braces(endings))}"
            table = {**table, "file": table["file"][len(top) :]}
        section["labels"] = table
    elif has_classes:
        section["label"] = "parent" if all(name.count("/") == 1 for name in names) else "top"
    elif kind in _LABELLED and any("/" in name for name in names):
        loose = [name for name in names if "/" not in name]
        raise ConfigError(
            f"{place.under(folder)} has {len(names) - len(loose):,} {kind} in folders and {len(loose):,} beside them, such as "
            f"{loose[0]}: name the folder whose folders are the classes, move the others, or write `label: none`"
        )
    return FoundSource(section, noun, notes)


def _last(names: list[str]) -> str:
    return last_extension(names[0].lower())


def _braces(endings: list[str]) -> str:
    return endings[0] if len(endings) == 1 else f"{{{','.join(endings)}}}"


def _said(name: str) -> str:
    extension = last_extension(name.lower())
    return {"jpg": "JPEG", "tif": "TIFF", "nii.gz": "NIfTI", "nii": "NIfTI", "npy": ".npy"}.get(
        extension, extension.upper()
    )


def _joined(place: Place, seen: list[str], kinds: list[str]) -> FoundSource | None:
    """Files of one stem in several folders, of which one is called as folders of pictures are, or with several extensions
    in one folder; else None."""
    named = [key for key in seen if _kind_of(key, frozenset()) in kinds or last_extension(key.lower()) in _BESIDE]
    folder, names, _, note = without_other_splits(named)
    groups: dict[tuple[str, str], dict[str, str]] = {}  # (first folder, extension) -> stem -> extension as written
    for name in names:
        top, slash, rest = name.rpartition("/") if name.count("/") == 1 else ("", "", name)
        extension = last_extension(rest.lower())
        kind = "image" if extension in IMAGE_EXTENSIONS else extension
        if "/" in rest or "." not in rest:
            return None
        groups.setdefault((f"{top}{slash}", kind), {})[rest[: -len(extension) - 1]] = rest[-len(extension) :]
    firsts = [group for group in groups if group[1] == "image" or (group[0] and group[1] in ("nii", "nii.gz", "npy"))]
    tops = {top for top, _ in groups}
    if tops != {""}:
        firsts = [group for group in firsts if group[0].rstrip("/").lower() in _PICTURE_FOLDERS]
    if len(firsts) != 1 or len(groups) < 2 or len(groups) > 5 or (tops != {""} and len(tops) != len(groups)):
        return None
    first, stems = firsts[0], groups[firsts[0]].keys()
    partners = [group for group in groups if group != first and len(groups[group].keys() & stems) * 2 > len(stems)]
    if not partners:
        return None
    fields, masks, marks = {"image": first}, list[str](), list[str]()
    for group in partners:
        name = re.sub(r"\W", "_", group[0].rstrip("/").removesuffix("s")) or FieldMap(None, {"cls": "label"}).field_of(
            group[1]
        )
        fields[str(name)] = group
        if group[1] == "image":
            masks.append(str(name))
        elif first[1] != "image":
            marks.append(str(name))
    if "npz" in {kind for _, kind in partners}:
        raise ConfigError(
            f"{place.under(folder)} has pictures and, of the same names, .npz: pipelines/detection.yaml shows how boxes and masks "
            "in them follow a picture; which array is what cannot be seen"
        )
    for name, group in fields.items():
        if lacking := len(groups[first].keys() ^ groups[group].keys()):
            raise ConfigError(
                f"{place.under(folder)}: {lacking:,} files of {first[0] or '.' + first[1]} and {group[0] or '.' + group[1]} have "
                f"no partner of the same name: move these, or write `fields` with `optional: [{name}]`"
            )
    patterns = {
        name: f"{top}*.{_braces(sorted({*groups[top, kind].values()}))}" for name, (top, kind) in fields.items()
    }
    section = {"kind": "files", "url": place.under(folder), "fields": patterns}
    notes = tuple(filter(None, [note]))
    moves = len(masks) == len(partners)
    return FoundSource(section, f"samples of {', '.join(patterns)}", notes, tuple(masks), tuple(marks), moves)


def _of_index(place: Place, kind: str, seen: list[str], keys: list[str]) -> FoundSource:
    """What a JSON file describes that lies beside the shards."""
    marks = ("index.json",) if kind == "mds" else ("state.json", "dataset_info.json")
    folders = sorted({key.rpartition("/")[0] for key in seen if key.rpartition("/")[2] in marks})
    folders = [folder for folder in folders if any(key.rpartition("/")[0] == folder for key in keys)]
    if not folders or place.is_file:
        raise ConfigError(
            f"{place.connector.describe(keys[0])} has no {' or '.join(marks)} beside it: name the folder that has both"
        )
    chosen = (
        folders[0] if len(folders) == 1 else next((one for one in folders if one.rpartition("/")[2] == "train"), None)
    )
    if chosen is None:
        raise ConfigError(f"{place.url} has several data sets, {', '.join(folders[:5])}: name the folder of one")
    others = ", ".join(folder for folder in folders if folder != chosen)
    notes = (f"only {chosen}; there are others as well: {others}",) if others else ()
    section: dict[str, Any] = {"kind": kind, "url": place.under(chosen)}
    files = [key.rpartition("/")[2] for key in keys if key.rpartition("/")[0] == chosen]
    if kind == "huggingface" and f"{chosen}/state.json".lstrip("/") not in seen:  # the cache, with splits in one folder
        splits = {
            match[1] for name in files if (match := re.fullmatch(r"[^/]+?-([^-]+)(?:-\d{5}-of-\d{5})?\.arrow", name))
        }
        if len(splits) > 1:
            if "train" not in splits:
                raise ConfigError(
                    f"{place.under(chosen)} has several splits: write `split:` with one of {', '.join(sorted(splits))}"
                )
            section["split"] = "train"
    return FoundSource(section, f"samples in {_NOUNS[kind]}", notes)


def _numbers(place: Place, keys: list[str], *, is_tokens: bool) -> FoundSource:
    """One .npy file of records, or files of tokens, in all of which the last token is the same."""
    if place.is_file:
        window = {"window": 2049} if is_tokens else {}
        notes = ("windows of one text, 2,048 tokens and the next one",) if is_tokens else ()
        return FoundSource(
            {"kind": "array", "url": place.url, "field": "tokens" if is_tokens else "data", **window},
            "samples of a .npy file",
            notes,
        )
    folder, names, begin, note = without_other_splits(keys)
    lasts = set()
    for name in names[:16]:
        info = next(info for info in place.infos if info.key == folder + name)
        header = parse_npy_header(place.begin(info.key, _MOST_BEGIN), info.size)
        data = bytearray(min(header.dtype.itemsize, info.size))
        place.connector.read_into(info.key, info.size - len(data), memoryview(data), etag=info.etag)
        lasts.add(int(np.frombuffer(data, header.dtype)[0]))
    if len(lasts) != 1 or len(names) < 2:
        raise ConfigError(
            f"{place.under(folder)} has {len(names):,} .npy files of whole numbers, and which token ends a document cannot be seen: "
            "write `source: {kind: tokens, url: ..., end: 0}` with that token; windows of one file: `loaderkit init FILE`"
        )
    section: dict[str, Any] = {"kind": "tokens", "url": place.under(folder), "end": lasts.pop()}
    if begin or any("/" in name for name in names):
        section["include"] = f"{'**/' if any('/' in name for name in names) else ''}{begin}*.npy"
    notes = (f"all files end with the token {section['end']}, so it is taken to end documents", note)
    return FoundSource(section, "documents in .npy files", tuple(filter(None, notes)), packs=True)


def _zarr(place: Place, keys: list[str]) -> FoundSource:
    if place.is_cut:
        raise ConfigError(
            f"{place.url} is a Zarr store with more objects than are looked at: write `source: {{kind: zarr, url: ..., samples: "
            "rows, fields: {image: PATH}}` (docs/guide/arrays.md)"
        )
    paths: list[str] = []
    for key in keys:
        match = _ZARR.fullmatch(key)
        if match and (match[2] == ".zarray" or b'"array"' in place.begin(key, _MOST_BEGIN)):
            paths.append(match[1] or "")
    stores = sorted({path[: path.find(".zarr") + 5] for path in paths if ".zarr" in path}) or [""]
    shapes = {}
    for path in paths:
        if path.startswith(stores[0]):
            name = "zarr.json" if f"{path}/zarr.json".lstrip("/") in keys else ".zarray"
            shapes[path[len(stores[0]) :].strip("/") or "/"] = tuple(
                json.loads(place.begin(f"{path}/{name}".lstrip("/"), _MOST_BEGIN))["shape"]
            )
    url = place.under(stores[0]) if len(stores) == 1 else place.url
    return _arrays(place, {"kind": "zarr", "url": url}, shapes, len(stores))


def _containers(place: Place, section: dict[str, Any], key: str, num: int) -> FoundSource:
    from loaderkit.sources.containers.hdf5 import shapes_of

    info = next(info for info in place.infos if info.key == key)
    return _arrays(place, section, shapes_of(place.connector, info), num)


def _arrays(place: Place, section: dict[str, Any], shapes: dict[str, tuple[int, ...]], num: int) -> FoundSource:
    """Rows of arrays that share their first length, or whole stores of volumes of one shape."""
    shapes = {path: shape for path, shape in shapes.items() if shape}
    lengths = {shape[0] for shape in shapes.values()}
    are_volumes = num > 1 and len({*shapes.values()}) == 1 and len(next(iter(shapes.values()))) == 3
    if not shapes or (len(lengths) > 1 and not are_volumes):
        found = ", ".join(f"{path} {list(shape)}" for path, shape in sorted(shapes.items())[:8]) or "no arrays"
        raise ConfigError(
            f"{place.url} has {found}, of different lengths, so it cannot be told what a sample is: write `source: {{kind: "
            f"{section['kind']}, url: ..., samples: rows, fields: {{image: PATH}}}}` with arrays of one length"
        )
    fields: dict[str, str] = {}
    for path in sorted(shapes):
        name = re.sub(r"\W", "_", path.rpartition("/")[2]) or "data"
        fields[re.sub(r"\W", "_", path) if name in fields else name] = path
    samples = "whole" if are_volumes else "rows"
    marks = tuple(name for name in fields if re.search("label|mask|seg", name)) if are_volumes else ()
    return FoundSource(
        {**section, "samples": samples, "fields": fields}, f"samples in {num:,} {_NOUNS[section['kind']]}", marks=marks
    )
