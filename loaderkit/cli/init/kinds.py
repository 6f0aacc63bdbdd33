"""Which kind of source reads a file, by its name: as the sources themselves know names."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from loaderkit.cli.init.place import DataPlace
from loaderkit.sources.containers.formats import USUAL
from loaderkit.sources.fields import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS, VIDEO_EXTENSIONS, FieldMap, last_extension
from loaderkit.sources.parquet.source import ParquetArgs
from loaderkit.sources.patterns import Patterns, is_hidden
from loaderkit.sources.serial.lines import LinesArgs
from loaderkit.sources.serial.tfrecord import TfrecordArgs
from loaderkit.sources.tar.source import TarArgs

OF_FILES = frozenset({"pictures", "videos", "sounds", "scans", "arrays"})
"""What `kind: files` reads."""
LABELLED = frozenset({"pictures", "videos", "sounds"})
"""Of these folders may be classes."""
_INDEXES = ("idx", "offsets")


@dataclass(frozen=True)
class FoundSource:
    """The section `source`, what its samples are, in a few words, and what is to be said of the choice."""

    section: dict[str, Any]
    noun: str
    notes: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()  # pictures of class numbers
    marks: tuple[str, ...] = ()  # volumes of class numbers
    moves: bool = True  # False: a field may say something of places in the picture
    packs: bool = False  # documents of tokens


@cache
def usual_names() -> dict[str, Patterns]:
    """Kind -> the names, in lower case, that its source takes of a folder."""
    return {
        "tar": Patterns(TarArgs(url="x").include),
        "parquet": Patterns(ParquetArgs(url="x").include),
        "lines": Patterns([f"*{ending}" for ending in LinesArgs(url="x").also_usual]),
        "tfrecord": Patterns(TfrecordArgs(url="x").usual),
        "hdf5": Patterns([f"*{ending}" for ending in USUAL]),
        "mds": Patterns("*.mds"),
        "huggingface": Patterns("*.arrow"),
    }


def kind_of(key: str) -> str | None:
    """A kind of source, or what `kind: files` reads; None for a name that does not say it."""
    name = key.rpartition("/")[2].lower()
    extension = last_extension(name)
    if extension in _INDEXES:
        return None
    for kind, patterns in usual_names().items():
        if patterns.matches(name):
            return kind
    field = FieldMap(None).field_of(extension)
    if field in ("npy", "npz", "nii"):
        return "scans" if field == "nii" else "arrays"
    known = {"pictures": IMAGE_EXTENSIONS, "videos": VIDEO_EXTENSIONS, "sounds": AUDIO_EXTENSIONS}
    return next((kind for kind, extensions in known.items() if extension in extensions), None)


def by_kind(place: DataPlace) -> dict[str, list[str]]:
    """The keys of all kinds that are there. A .bin with an .idx beside it is Megatron's."""
    keys = {info.key for info in place.infos}
    found: dict[str, list[str]] = {}
    for info in place.infos:
        is_megatron = info.key.endswith(".bin") and f"{info.key[:-4]}.idx" in keys
        kind = "tokens" if is_megatron else kind_of(info.key)
        if kind is not None and not is_hidden(info.key):
            found.setdefault(kind, []).append(info.key)
    return found


def in_braces(endings: set[str]) -> str:
    """A part of a pattern that stands for any of these texts."""
    return next(iter(endings)) if len(endings) == 1 else f"{{{','.join(sorted(endings))}}}"
