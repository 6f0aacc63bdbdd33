"""Settings that choose files, and that map extensions to fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from loaderkit._internal.config.settings import as_tuple
from loaderkit.sources.patterns import Patterns, expand_braces

IMAGE_EXTENSIONS = frozenset(
    {
        "jpg",
        "jpeg",
        "jpe",
        "jfif",
        "png",
        "webp",
        "bmp",
        "gif",
        "tif",
        "tiff",
        "ppm",
        "pgm",
        "pbm",
        "pnm",
        "avif",
        "jp2",
        "j2k",
    }
)
VIDEO_EXTENSIONS = frozenset({"mp4", "m4v", "mov", "mkv", "webm", "avi"})
AUDIO_EXTENSIONS = frozenset({"wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "mka"})


def _checked_patterns(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    try:
        Patterns(value)
    except re.error as error:
        raise ValueError(f"a pattern, not {value!r} ({error})") from None
    return value


Include = Annotated[
    str | tuple[str, ...],
    BeforeValidator(as_tuple),
    Field(min_length=1),
    AfterValidator(_checked_patterns),
]
"""The objects that belong to a source: a pattern or a list of them; see `Patterns`."""


def _checked_fields(value: dict[str, str]) -> dict[str, str]:
    owner: dict[str, str] = {}
    for name, listed in value.items():
        extensions = _split_extensions(listed)
        if not name or not all(extensions) or _is_pattern(listed):
            raise ValueError(f"extensions separated by ';', such as 'jpg;jpeg', not {name!r}: {listed!r}")
        for extension in extensions:
            if owner.setdefault(extension, name) != name:
                raise ValueError(f"each extension once, not {extension!r} for both {owner[extension]!r} and {name!r}")
    return value


def _split_extensions(listed: str) -> list[str]:
    return [part.strip().lower().removeprefix(".") for part in listed.split(";")]


Fields = Annotated[dict[str, str], Field(min_length=1), AfterValidator(_checked_fields)]
"""Name of a field -> its extensions, separated by ";"."""


def are_patterns(fields: Mapping[str, str] | None) -> bool:
    """True if `fields` has a pattern for every field, False if extensions. Raises ValueError if it has both."""
    if not fields or not any(map(_is_pattern, fields.values())):
        return False
    if not all(map(_is_pattern, fields.values())):
        raise ValueError(f"patterns for all fields, as in 'masks/*.png', or extensions for all, not {fields}")
    return True


def _is_pattern(listed: str) -> bool:
    return any(wildcard in listed for wildcard in "*?[/")


def _checked_fields_or_patterns(value: dict[str, str]) -> dict[str, str]:
    if not are_patterns(value):
        return _checked_fields(value)
    for listed in value.values():
        _checked_patterns(listed)
    return value


FieldsOrPatterns = Annotated[dict[str, str], Field(min_length=1), AfterValidator(_checked_fields_or_patterns)]
"""The same, or name of a field -> the pattern of its files."""


Optional = Annotated[
    tuple[str, ...],
    BeforeValidator(as_tuple),
    Field(description="fields whose file may be missing: it is then read as an empty one, so a text is empty"),
]
"""The fields that a sample may lack, as pictures without objects have no file of labels."""


def check_optional(optional: tuple[str, ...], fields: Iterable[str]) -> None:
    """Raise ValueError for a name that is none of the `fields` that may be missing."""
    known = list(fields)
    for name in optional:
        if name not in known:
            raise ValueError(f"`optional` names {name!r}, which is none of the fields that may be: {', '.join(known)}")


_FIELDS = (
    dict.fromkeys(IMAGE_EXTENSIONS, "image")
    | dict.fromkeys(VIDEO_EXTENSIONS, "video")
    | dict.fromkeys(AUDIO_EXTENSIONS, "audio")
    | {"nii.gz": "nii"}
)
"""Extension -> its field, where no `fields` are given; any other extension is its own field's name."""


class FieldMap:
    """Maps extensions (lower case, without the leading dot) to fields.

    With `fields` None extensions of images belong to `image`, of videos to `video` and of sounds to `audio`, those in
    `defaults` to the field given there, and any other to the field of the same name.
    """

    def __init__(self, fields: Mapping[str, str] | None, defaults: Mapping[str, str] | None = None) -> None:
        self.names = None if fields is None else tuple(fields)
        self._fields: dict[str, str] = {}
        if fields is None:
            self._fields = _FIELDS | dict(defaults or {})
        else:
            for name, listed in fields.items():
                self._fields |= dict.fromkeys(_split_extensions(listed), name)

    def field_of(self, extension: str) -> str | None:
        """The extension's field; None if `fields` was given and has none."""
        return self._fields.get(extension, extension if self.names is None else None)

    def split_key(self, key: str) -> tuple[str, str] | None:
        """Field and extension of a file name; of "a.seg.png" the extension is "seg.png" if a field has it, else "png".

        None if the name has no extension, or one that no field has.
        """
        base = key[key.rfind("/") + 1 :].lower()
        dot = base.find(".", 1)
        while dot >= 0:
            extension = base[dot + 1 :]
            later = base.find(".", dot + 1)
            if extension in self._fields:
                return self._fields[extension], extension
            if later < 0 and self.names is None and extension:
                return extension, extension
            dot = later
        return None


def last_extension(name: str) -> str:
    """The part of a name, or of an extension, that says what a file is: what follows its last dot, or "nii.gz"."""
    return "nii.gz" if name.endswith("nii.gz") else name.rpartition(".")[2]


def described_fields(fields: Mapping[str, str]) -> dict[str, str] | None:
    """Field -> its content (image, text, a number, ...) by its extensions; None if only the data can tell."""
    named = {name: _split_extensions(listed) for name, listed in fields.items()}
    if are_patterns(fields):
        named = {name: [_last_extension(text) for text in expand_braces(listed)] for name, listed in fields.items()}
        if not all(extension.replace(".", "").isalnum() for extensions in named.values() for extension in extensions):
            return None
    return _unless_archived({name: _content_of(extensions) for name, extensions in named.items()})


def included_fields(include: str | tuple[str, ...]) -> dict[str, str] | None:
    """The same for the files that patterns include; None if a pattern does not end in one extension."""
    patterns = (include,) if isinstance(include, str) else include
    extensions = list(map(_last_extension, patterns))
    if not all(extension.replace(".", "").isalnum() for extension in extensions):
        return None
    named = {_FIELDS.get(extension, extension): _content_of([extension]) for extension in extensions}
    return _unless_archived(named)


def _last_extension(pattern: str) -> str:
    """The extension that a pattern ends in, in lower case; "" if there is none."""
    return last_extension(pattern.lower()) if "." in pattern else ""


_CONTENTS = {
    "txt": "text",
    "text": "text",
    "json": "JSON",
    "cls": "a number",
    "npy": "an array",
    "nii": "an array",
    "nii.gz": "an array",
    "npz": "several arrays",
}


_KINDS = (
    (IMAGE_EXTENSIONS, "image"),
    (VIDEO_EXTENSIONS | {"gif"}, "video"),
    (AUDIO_EXTENSIONS, "sound"),
)


def _content_of(extensions: list[str]) -> str:
    last = {extension.rpartition(".")[2] for extension in extensions}
    for known, kind in _KINDS:
        if last <= known:
            return kind
    return _CONTENTS.get(last.pop(), "bytes") if len(last) == 1 else "bytes"


def _unless_archived(fields: dict[str, str]) -> dict[str, str] | None:
    """None if one of the fields is an archive, whose arrays are known only when it is read."""
    return None if "several arrays" in fields.values() else fields
