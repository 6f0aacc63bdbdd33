"""`kind: files`: each file is a sample, or files of several folders together; its folder is the class if configured."""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, islice
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, model_validator

from loaderkit._internal.config.settings import Duration, as_tuple
from loaderkit._internal.text import warn
from loaderkit.connectors.base import ByteRange, Connector, ObjectInfo, Ranges
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import ConfigError, SourceError
from loaderkit.samples.sample import FieldRange, Sample, Table
from loaderkit.sources.base import ReadContext, Reader, SourceKind
from loaderkit.sources.fields import (
    IMAGE_EXTENSIONS,
    FieldMap,
    FieldsOrPatterns,
    Include,
    Optional,
    are_patterns,
    check_optional,
    described_fields,
    included_fields,
)
from loaderkit.sources.files.class_folders import ClassFolders, oddities, shifted
from loaderkit.sources.files.joined import join_files
from loaderkit.sources.files.kept import KeptListing, ListedFiles
from loaderkit.sources.files.labels import LabelTable, LabelTableArgs
from loaderkit.sources.listing import Listing, cut_blocks, extension_of, said_counts
from loaderkit.sources.patterns import Patterns, is_hidden
from loaderkit.sources.ranges import RangeSource

_MAX_COUNTED = 10_000
_GLOB, _GLOB_OF_STORES = re.compile(r"[*?[]"), re.compile(r"\*")  # a bucket's keys may well have the others

_Named = TypeVar("_Named", tuple[str, ...], dict[str, int])


def _checked_classes(value: _Named) -> _Named:
    if len(set(value)) < len(value):
        raise ValueError("distinct names, as each is one class")
    if isinstance(value, dict) and max(value.values()) >= 1_000_000:
        raise ValueError("numbers below a million")
    return value


Classes = Annotated[
    Annotated[tuple[str, ...], Field(min_length=1)] | Annotated[dict[str, NonNegativeInt], Field(min_length=1)],
    BeforeValidator(as_tuple),
    AfterValidator(_checked_classes),
]
"""The names of classes in the order of their numbers, or name -> number."""


class FilesArgs(StoreArgs):
    """Every matching file below `url` is a sample."""

    kind: Literal["files"] = "files"
    url: Annotated[
        str, Field(min_length=1, description="the folder: a path, file:// or memory://; or, with a glob, the files")
    ]
    include: Include | None = Field(
        None,
        description="which files, relative to url: globs with **, and braces; default: images, or all files if none of the "
        "first 10,000 is an image",
    )
    label: Literal["parent", "top", "none"] = Field(
        "none",
        description="parent: the class is the index of the file's folder in the sorted folder names; top: that of the first "
        "folder below `url`, as torchvision's ImageFolder has it",
    )
    labels: LabelTableArgs | None = Field(
        None,
        description="`label` from a table instead, as in {file: train.csv, key: name, value: class}: whole numbers, numbers, "
        "or texts, which become classes",
    )
    classes: Classes | None = Field(
        None,
        description="with `label`, the folders' names in the order of their class numbers, or {folder: number}; with `labels`, "
        "its texts; default: all there are, sorted",
    )
    fields: FieldsOrPatterns | None = Field(
        None,
        description="field -> extensions, as in {image: 'jpg;png'}; or field -> pattern, as in {image: images/*.jpg, mask: "
        "masks/*.png}: files with one stem are one sample; default: images are `image`",
    )
    optional: Optional = ()
    listing: Literal["fresh", "keep"] | Duration = Field(
        "fresh",
        description="keep: the listing is kept on this machine and used while no folder has changed, of local folders; a "
        "duration, as 1d: used for that long, whatever has changed; fresh: listed at every start",
    )

    @model_validator(mode="after")
    def _label_has_one_origin(self) -> FilesArgs:
        if self.label != "none" and self.fields and "label" in self.fields:
            raise ValueError(f"`label: {self.label}` and a field named label exclude each other: remove one of them")
        if self.labels is not None and (self.label != "none" or "label" in (self.fields or ())):
            raise ValueError(
                "`labels` makes the field `label`: remove the other one, `label` or the field of that name"
            )
        if self.classes is not None and self.label == "none" and self.labels is None:
            raise ValueError(
                "`classes` numbers the folders of `label: parent` (or top), or the texts of `labels`: add that, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _patterns_are_given_once(self) -> FilesArgs:
        if are_patterns(self.fields) and self.include is not None:
            raise ValueError("`include` and patterns in `fields` exclude each other: the patterns say which files")
        if self.optional and not are_patterns(self.fields):
            raise ValueError("`optional` is of `fields` with patterns: without, each file is a sample")
        check_optional(self.optional, [*(self.fields or ())][1:])
        return self

    @property
    def _cut(self) -> int:
        """Where the glob in `url` begins; the length of `url` if it has no glob, or is the name of a folder."""
        is_local = "://" not in self.url
        found = (_GLOB if is_local else _GLOB_OF_STORES).search(self.url)
        if found is None or (is_local and os.path.isdir(self.url)):
            return len(self.url)
        return self.url.rfind("/", 0, found.start()) + 1

    @property
    def glob(self) -> str | None:
        """The glob in `url`, if it has one."""
        return self.url[self._cut :] or None

    @property
    def root(self) -> str:
        """The connector's root: `url`, or the folder before its glob."""
        return self.url[: self._cut] or "."

    @property
    def patterns(self) -> str | tuple[str, ...] | None:
        """Which files below `root`, or None for the usual ones."""
        return self.include or self.glob

    @property
    def class_numbers(self) -> dict[str, int]:
        """Folder -> class number, as `classes` has it."""
        given = self.classes or ()
        return given if isinstance(given, dict) else {name: number for number, name in enumerate(given)}


class FilesSource(RangeSource):
    """The files of `connector` that match, in the order of the UTF-8 bytes of their keys.

    A key is the path relative to `url` with its extension. With `label: parent`, `classes` are the sorted names of all
    folders that hold a matching file, also of files beyond `limit`, so that a class keeps its number; or the given
    classes, by number (folders with the same number are joined by "/"). With patterns in `fields` all this is about the
    first field's files, and the others are their partners. `left_out` counts, by extension, the images that `include`
    does not match; without `include` the files beside the images. Raises `SourceError` if nothing matches, a file fits
    no field, has no partner or its folder is no class, and what listing raises.
    """

    def __init__(self, connector: Connector, args: FilesArgs) -> None:
        self._connector = connector
        self._args = args
        self._patterns = Patterns(args.patterns or "**/*")
        self._limit = None if args.labels is not None else args.limit  # while listing: later of the files with a label
        self._odd_labels: tuple[str, ...] = ()
        self._first: str | None = None  # the field of the keys' files; None: their extensions tell
        if args.fields is not None and are_patterns(args.fields):
            self._first = next(iter(args.fields))
            self._patterns = Patterns(args.fields[self._first])
        self._field_map = FieldMap(args.fields if self._first is None else None)
        self._kept = KeptListing.of(connector, args, args.listing)
        listed = None if self._kept is None else self._kept.load()
        is_new = listed is None
        if listed is None:
            if self._kept is not None:
                self._kept.begin()
            listed = self._list()
        self._take(listed)
        if args.labels is not None:
            self._take_labels(LabelTable(connector, args.labels))
        if is_new or args.labels is not None:
            for field, partners in self._partners.items():
                self._extensions |= self._extensions_of(field, partners)
        if self._takes_images and args.limit is None and self.left_out.total() >= len(self._listing):
            raise SourceError(
                f"{args.url!r} holds {len(self._listing)} images and {self.left_out.total()} other files "
                f"({said_counts(self.left_out)}): say in `include` which are the samples, as in '**/*.jpg', or '**/*' for all"
            )
        if is_new or args.labels is not None:
            self._refuse_pairs()
        if args.label != "none":
            self._number_classes(listed.folders, listed.folder_ids)
        if self._kept is not None and is_new:
            found = replace(listed, extensions=tuple(self._extensions), missing=self._missing)
            self._kept.save(listed if args.labels is not None else found)

    def _list(self) -> ListedFiles:
        """List the files. Raises SourceError if there are none."""
        args, connector = self._args, self._connector
        self._missing: dict[str, str] = {}
        self._extensions: dict[tuple[str, str], None] = {}
        self.left_out: Counter[str] = Counter()
        self.num_of_systems = 0
        partners: dict[str, Listing] = {}
        if self._first is not None:
            assert args.fields is not None
            partners = join_files(connector, args.fields, self._limit, args.optional)
            first = partners.pop(self._first)
            files: Iterable[ObjectInfo] = map(first.__getitem__, range(len(first)))
        else:
            files = connector.list(self._patterns.prefix)
        self._takes_images = args.patterns is None and args.fields is None and self._has_image()
        self._folders = ClassFolders(args.class_numbers, top=args.label == "top", is_given=args.classes is not None)
        folder_ids = array("q")
        chosen = Listing(self._chosen(files, folder_ids))
        if not len(chosen):
            self._fail_empty()
        return ListedFiles(
            chosen,
            self._folders.numbers,
            np.array(folder_ids, np.int64),
            partners,
            tuple(self._extensions),
            self._missing,
            self.left_out,
            self.num_of_systems,
            self._takes_images,
        )

    def _take(self, listed: ListedFiles) -> None:
        self._listing = listed.files
        self._partners = dict(listed.partners)  # of the other fields, one file a sample
        self._missing = dict(listed.missing)  # optional field -> the extension that a missing file would have
        self._extensions = dict.fromkeys(listed.extensions)  # in order of first use
        self.left_out = Counter(listed.left_out)
        self.num_of_systems = listed.num_of_systems  # files in folders that a NAS leaves behind
        self._takes_images = listed.takes_images

    def _take_labels(self, table: LabelTable) -> None:
        """Set the labels, and leave out the files without one, and those beyond `limit`."""
        given = self._args.class_numbers if self._args.classes is not None else None
        found = table.match(self._listing.keys, given, self._connector.describe)
        kept = found.rows[: self._args.limit]
        self.labels, self._odd_labels = found.values[: self._args.limit], found.left_out
        self.classes = found.classes if given is None else self._names_of(given)
        if len(kept) < len(self._listing):
            self._listing = self._listing.part(kept)
            self._partners = {field: partners.part(kept) for field, partners in self._partners.items()}

    @staticmethod
    def _names_of(numbers: Mapping[str, int]) -> list[str]:
        """The names of classes by their numbers; names with the same number are joined by "/"."""
        names = [""] * (1 + max(numbers.values()))
        for name, number in sorted(numbers.items()):
            names[number] = f"{names[number]}/{name}" if names[number] else name
        return names

    def _number_classes(self, folders: Mapping[str, int], labels: NDArray[np.int64]) -> None:
        """Set the classes, and of every sample its own, from its folder's number."""
        if self._args.classes is None:
            self.classes = sorted(folders)
            class_of = {name: number for number, name in enumerate(self.classes)}
            labels = np.array([class_of[name] for name in folders], np.int64)[labels]
            if said := shifted(self._args.root, self.classes):
                warn(said)
        else:
            self.classes = self._names_of(folders)
        self.labels = labels.astype(np.int32)

    def oddities(self) -> list[str]:
        """What looks odd in the classes, and which files have no label, for `loaderkit check`."""
        if self.classes is None or self._args.classes is not None or self._args.labels is not None:
            return list(self._odd_labels)
        return list(oddities(self._args.root, self.classes))

    def _refuse_pairs(self) -> None:
        """Raise SourceError for files of one stem that are other fields: each file is a sample of its own here."""
        if self._first is not None or len({field for field, _ in self._extensions}) < 2:
            return
        seen: dict[str, str] = {}  # stem -> the first file with it
        for key in self._listing.keys:
            stem = key[: key.rfind(".")]
            first = seen.setdefault(stem, key)
            fields = [self._field_of(name)[0] for name in (first, key)]
            if fields[0] != fields[1]:
                pairs = zip(fields, (first, key), strict=True)
                patterns = ", ".join(f"{field}: '**/*.{self._field_of(name)[1]}'" for field, name in pairs)
                raise SourceError(
                    f"{first!r} and {key!r} are two samples, one with the field {fields[0]!r} and one with {fields[1]!r}, as "
                    f"each file is one: for one sample of both give patterns, `fields: {{{patterns}}}`, without `include`"
                )

    def __len__(self) -> int:
        return len(self._listing)

    def reader(self, context: ReadContext) -> Reader:
        """See `RangeSource`. What was not listed now may be out of date."""
        return super().reader(context if self._kept is None else self._kept.guarded(context))

    def key(self, index: int) -> str:
        """The file's path relative to `url`."""
        return self._listing.keys[index]

    def origin(self, index: int) -> str:
        """The same as the key: a file is its own origin."""
        return self._listing.keys[index]

    def ranges(self, index: int) -> list[FieldRange]:
        """The whole file, as the field its extension belongs to, and its partners."""
        info = self._listing[index]
        files = {self._field_of(info.key)[0]: info} | {name: files[index] for name, files in self._partners.items()}
        return [
            FieldRange(
                name,
                self._missing[name] if name in self._missing and file.key == info.key else self._field_of(file.key)[1],
                ByteRange(file.key, 0, file.size, file.etag),
            )
            for name, file in files.items()
        ]

    def table(self, indices: NDArray[np.int64]) -> Table | None:
        """The whole files, if all files of a field have one extension."""
        if len(self._extensions) > 1 + len(self._partners):
            return None
        keys, sizes, etags = self._listing.take(indices)
        if self._partners:
            columns: list[Any] = [(keys, sizes, etags), *(files.take(indices) for files in self._partners.values())]
            # By column: the values of all fields, sample by sample.
            keys, sizes, etags = (
                [*chain.from_iterable(zip(*column, strict=True))] for column in zip(*columns, strict=True)
            )
        constants = {} if self.labels is None else {"label": self.labels[indices].tolist()}
        return Table(tuple(self._extensions), Ranges(keys, [0] * len(sizes), sizes, etags), constants)

    def keys(self, indices: NDArray[np.int64]) -> list[str]:
        """The keys of several files."""
        return self._listing.keys.take(indices)

    def constants(self, index: int) -> Sample:
        """{"label": number} with `label: parent` or `labels`, else nothing."""
        return {} if self.labels is None else {"label": self.labels[index].item()}

    def blocks(self, block_bytes: int) -> NDArray[np.int64]:
        """Runs of samples of about `block_bytes` together: int64 [number of runs + 1]."""
        sizes = sum((files.sizes for files in self._partners.values()), start=self._listing.sizes)
        return cut_blocks(sizes, block_bytes)

    def fingerprint(self) -> str:
        """16 hexadecimal digits from keys, sizes and classes."""
        digest = blake2b(digest_size=8)
        for files in (self._listing, *self._partners.values()):
            digest.update(files.keys.digest())
            digest.update(files.sizes.astype("<i8").tobytes())
        digest.update("\0".join(self.classes or []).encode("utf-8", "surrogateescape"))
        if self._args.labels is not None and self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()

    def _chosen(self, files: Iterable[ObjectInfo], folder_ids: array[int]) -> Iterator[ObjectInfo]:
        """The files that are samples. Records the folder of every matching file, and the folders of samples in
        `folder_ids`."""
        num_chosen = 0
        table = None if self._args.labels is None else self._args.labels.file
        for info in files:
            if info.key == table:
                continue
            matches = self._patterns.matches(info.key)
            if not matches or self._takes_images:
                is_image = extension_of(info.key).lower() in IMAGE_EXTENSIONS
                if not matches or not is_image:
                    if is_hidden(info.key):
                        self.num_of_systems += "/." not in f"/{info.key}"
                    elif is_image or self._takes_images:
                        self.left_out[extension_of(info.key)] += 1
                    continue
            is_sample = self._limit is None or num_chosen < self._limit
            if not is_sample and (self._args.label == "none" or self._args.classes is not None):
                return
            field_and_extension = self._field_of(info.key)
            if self._args.label != "none":
                folder = self._folders.number_of(info.key, self._connector.describe, self._args.url)
                if is_sample:
                    folder_ids.append(folder)
            if is_sample:
                num_chosen += 1
                self._extensions.setdefault(field_and_extension)
                yield info

    def _extensions_of(self, field: str, partners: Listing) -> dict[tuple[str, str], None]:
        """The extensions of a field's files; the extension that missing files would have is noted."""
        pairs = zip(partners.keys, self._listing.keys, strict=True)
        extensions = dict.fromkeys(self._field_of(key)[1] for key, first in pairs if key != first)
        if field in self._args.optional:
            pattern = (self._args.fields or {})[field]
            self._missing[field] = next(iter(extensions), extension_of(pattern).lower())
            extensions.setdefault(self._missing[field])
        return {(field, extension): None for extension in extensions}

    def _has_image(self) -> bool:
        first = islice(self._connector.list(""), _MAX_COUNTED)
        return any(
            extension_of(info.key).lower() in IMAGE_EXTENSIONS and self._patterns.matches(info.key) for info in first
        )

    def _field_of(self, key: str) -> tuple[str, str]:
        field_and_extension = self._field_map.split_key(key)
        if field_and_extension is None:
            fields = self._args.fields
            if self._first is not None:
                text = "a pattern of `fields`, but it has no extension to name its format: narrow the pattern"
            elif fields:
                text = (
                    f"`include`, but none of the fields {fields} has its extension; narrow `include` or widen `fields`"
                )
            else:
                text = "`include`, but it has no extension to name its field; narrow `include` or widen `fields`"
            raise SourceError(f"{self._connector.describe(key)} matches {text}")
        return field_and_extension if self._first is None else (self._first, field_and_extension[1])

    def _fail_empty(self) -> None:
        keys = [info.key for info in islice(self._connector.list(""), _MAX_COUNTED)]
        number = f"{len(keys)}" + (" or more" if len(keys) == _MAX_COUNTED else "")
        seen = f"{number} files are there, such as {keys[0]!r}" if keys else "there is no file at all"
        raise SourceError(
            f"no file below {self._args.url!r} matches {self._patterns}: {seen}; check `url` and "
            + ("`include`" if self._first is None else "`fields`")
        )


def _fields_of(args: FilesArgs) -> dict[str, str] | None:
    fields = included_fields(args.patterns or "**/*") if args.fields is None else described_fields(args.fields)
    if fields is not None and (args.label != "none" or args.labels is not None):
        fields["label"] = "a number"
    return fields


def _open(args: FilesArgs, connector: Connector) -> FilesSource:
    if args.glob is not None and (args.include is not None or are_patterns(args.fields)):
        raise ConfigError(
            f"source.url: {args.url!r} has a glob, and `include` or `fields` have one as well: give the folder in `url`"
        )
    return FilesSource(connector, args)


FILES = SourceKind(FilesArgs, _open, lambda args: args.root, _fields_of, encoded="all")
