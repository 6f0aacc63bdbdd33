"""What a source keeps about its samples: which keys are wanted, compact tables, fields by extension, blocks."""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field

from loaderkit.native import kernels
from loaderkit.types import ObjectInfo

IMAGE_EXTENSIONS = frozenset(
    {"jpg", "jpeg", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif", "jp2", "j2k"}
)
_MAX_PATTERNS = 1_000_000

# ---------------------------------------------------------------------------------------------------- tables


class StringTable:
    """Immutable strings in one piece of memory: their UTF-8 bytes and 8 bytes each (a `str` in a list takes 57 more).

    Lone surrogates, which stand for file names that are not UTF-8, keep their place.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        data = bytearray()
        ends = array("q")
        for text in strings:
            data += text.encode("utf-8", "surrogateescape")
            ends.append(len(data))
        self._data = bytes(data)
        self._ends = np.array(ends, np.int64)

    @classmethod
    def packed(cls, data: bytes, ends: NDArray[np.int64]) -> StringTable:
        """The table of the strings that lie one behind another in `data` and end at `ends` (int64 [n])."""
        table = cls()
        table._data, table._ends = data, ends
        return table

    @classmethod
    def joined(cls, tables: Iterable[StringTable]) -> StringTable:
        """The strings of all tables, in order."""
        parts = list(tables)
        shifts = np.cumsum([0, *(len(part._data) for part in parts)])
        ends = [part._ends + shift for part, shift in zip(parts, shifts, strict=False)]
        return cls.packed(b"".join(part._data for part in parts), np.concatenate([np.empty(0, np.int64), *ends]))

    def head(self, num: int) -> StringTable:
        """The first `num` strings, or all if there are no more."""
        ends = self._ends[:num]
        return self.packed(self._data[: int(ends[-1]) if len(ends) else 0], ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> str:
        num = len(self._ends)
        if not -num <= place < num:
            raise IndexError(f"string {place} of {num}")
        place %= num
        start = int(self._ends[place - 1]) if place else 0
        return self._data[start : int(self._ends[place])].decode("utf-8", "surrogateescape")

    def take(self, places: NDArray[np.int64]) -> list[str]:
        """The strings at several places (0 to len - 1), in a tenth of the time of one by one."""
        if kernels is not None:
            found: list[str] = kernels.texts(self._data, self._ends, np.ascontiguousarray(places, np.int64))
            return found
        ends = self._ends[places].tolist()
        starts = np.where(places > 0, self._ends[places - 1], 0).tolist()
        data = self._data
        return [data[a:b].decode("utf-8", "surrogateescape") for a, b in zip(starts, ends, strict=True)]

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends.tolist():
            yield self._data[start:end].decode("utf-8", "surrogateescape")
            start = end

    def digest(self) -> bytes:
        """16 bytes that differ, for all practical purposes, when any string or the order differs."""
        found = blake2b(self._ends.astype("<i8").tobytes(), digest_size=16)
        found.update(self._data)
        return found.digest()


def numbered(indices: NDArray[np.int64]) -> list[str]:
    """The keys of samples that have numbers instead: "0", "1", ... for int64 [n], none below 0."""
    if kernels is None:
        return list(map(repr, indices.tolist()))
    found: list[str] = kernels.decimals(indices)
    return found


class Catalog:
    """A listing of objects: their `keys`, `sizes` (bytes, int64 [N]) and `etags`; about 80 bytes an object."""

    def __init__(self, infos: Iterable[ObjectInfo] = ()) -> None:
        sizes = array("q")
        etags: list[str] = []

        def keys() -> Iterator[str]:
            for info in infos:
                sizes.append(info.size)
                etags.append(info.etag)
                yield info.key

        self.keys = StringTable(keys())
        self.sizes = np.array(sizes, np.int64)
        self.etags = StringTable(etags)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, place: int) -> ObjectInfo:
        return ObjectInfo(self.keys[place], int(self.sizes[place]), self.etags[place])


def cut_blocks(
    sizes: NDArray[np.int64], block_bytes: int, boundaries: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Cut samples of `sizes` bytes (int64 [N]) into runs of about `block_bytes`.

    `boundaries` are the first samples of the objects (ascending; 0 and N may be among them): no run crosses one. Each
    object is cut into equal parts, as many as come nearest to `block_bytes`, so that none ends in a tiny rest.
    Returns the first sample of every run and, last, N: int64 [number of runs + 1].
    """
    num_samples = len(sizes)
    if num_samples == 0:
        return np.zeros(1, np.int64)
    inner = np.zeros(0, np.int64) if boundaries is None else np.asarray(boundaries, np.int64)
    firsts = np.unique(np.concatenate([[0], inner[(inner > 0) & (inner < num_samples)]])).astype(np.int64)
    counts = np.diff(firsts, append=num_samples)
    ends = np.cumsum(sizes)
    offsets = ends - sizes
    totals = ends[firsts + counts - 1] - offsets[firsts]
    num_parts = np.maximum(1, np.rint(totals / block_bytes))
    part_bytes = np.maximum(totals / num_parts, 1.0)
    within = offsets - np.repeat(offsets[firsts], counts)
    part = np.minimum(np.floor(within / np.repeat(part_bytes, counts)), np.repeat(num_parts - 1, counts))
    is_first = np.empty(num_samples, np.bool_)
    is_first[1:] = part[1:] != part[:-1]
    is_first[firsts] = True
    return np.append(np.flatnonzero(is_first), num_samples).astype(np.int64)


# -------------------------------------------------------------------------------------------------- patterns

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([A-Za-z])\.\.([A-Za-z])")


def expand_braces(pattern: str) -> list[str]:
    """What a shell makes of "{a,b}", "{000..099}" (zeros kept), "{0..8..2}" and "{a..f}", also nested, in its order.

    Braces with neither a comma nor a range stay as they are. Raises ValueError beyond a million results.
    """
    open_at, close_at = _first_braces(pattern)
    if close_at < 0:
        return [pattern]
    before, body = pattern[:open_at], pattern[open_at + 1 : close_at]
    options = _range(body)
    if options is None:
        parts = _split_commas(body)
        options = [text for part in parts for text in expand_braces(part)]
        if len(parts) == 1:
            options = [f"{{{text}}}" for text in options]
    tails = expand_braces(pattern[close_at + 1 :])
    if len(options) * len(tails) > _MAX_PATTERNS:
        raise ValueError(f"{pattern!r} stands for more than {_MAX_PATTERNS} names")
    return [before + text + tail for text in options for tail in tails]


def _first_braces(pattern: str) -> tuple[int, int]:
    """The places of the first brace that is closed again and of its partner; -1 when there is none."""
    for start in range(len(pattern)):
        depth = 0
        for place in range(start, len(pattern) if pattern[start] == "{" else start):
            depth += {"{": 1, "}": -1}.get(pattern[place], 0)
            if depth == 0:
                return start, place
    return -1, -1


def _split_commas(body: str) -> list[str]:
    parts, depth = [""], 0
    for char in body:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def _range(body: str) -> list[str] | None:
    match = _RANGE.fullmatch(body)
    if match is None:
        return None
    low, high = (ord(match[4]), ord(match[5])) if match[4] else (int(match[1]), int(match[2]))
    step = abs(int(match[3] or 1)) or 1
    if abs(high - low) // step >= _MAX_PATTERNS:
        raise ValueError(f"{{{body}}} stands for more than {_MAX_PATTERNS} names")
    numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    if match[4]:
        return [chr(code) for code in numbers]
    has_zeros = any(re.match(r"-?0\d", text) for text in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if has_zeros else 0
    return [f"{number:0{width}d}" for number in numbers]


class Patterns:
    """Globs over whole keys, case-sensitive: `**` any number of directories, `*` `?` `[..]` inside one, and braces.

    A part of a key that starts with a dot is matched only by a part of a pattern that does.
    """

    def __init__(self, patterns: str | Iterable[str]) -> None:
        self.written = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        expanded = dict.fromkeys(itertools.chain.from_iterable(map(expand_braces, self.written)))
        self._literals = {text for text in expanded if not re.search(r"[*?\[]", text)}
        self._globs = {text: re.compile(_regex(text), re.DOTALL) for text in expanded if text not in self._literals}
        self._order = list(expanded)
        heads = [re.split(r"[*?\[]", text, maxsplit=1)[0] for text in expanded]
        # All heads start with what the least and the greatest have in common.
        low, high = min(heads), max(heads)
        same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
        self.prefix = low[:same]

    def __str__(self) -> str:
        return ", ".join(map(repr, self.written))

    def matches(self, key: str) -> bool:
        """Whether any pattern matches the whole key."""
        return key in self._literals or any(glob.fullmatch(key) for glob in self._globs.values())

    @property
    def names(self) -> list[str] | None:
        """All that can match, braces expanded, in the order in which it was written; None if there are wildcards."""
        return None if self._globs else self._order

    def without_match(self, keys: Iterable[str]) -> list[str]:
        """The patterns, braces expanded, that match none of `keys`, in the order in which they were written."""
        found = set(keys)
        return [
            text
            for text in self._order
            if not (text in found if text in self._literals else any(map(self._globs[text].fullmatch, found)))
        ]


def _regex(pattern: str) -> str:
    parts = pattern.split("/")
    regex = ""
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        if part == "**":
            regex += r"(?:(?!\.)[^/]+/)*" + (r"(?!\.)[^/]+" if is_last else "")
            continue
        regex += "" if part.startswith(".") else r"(?!\.)"
        for token in re.findall(r"\[[!^]?\]?[^\]]*\]|.", part, re.DOTALL):
            if token in ("*", "?"):
                regex += "[^/]" + token.replace("?", "")
            elif len(token) > 1:
                negated = token[1] in "!^"
                body = re.sub(r"[\[\]\\&~|]", r"\\\g<0>", token[2 if negated else 1 : -1])
                regex += f"(?!/)[{'^' if negated else ''}{body}]"
            else:
                regex += re.escape(token)
        regex += "" if is_last else "/"
    return regex


def _checked_patterns(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    try:
        Patterns(value)
    except re.error as error:
        raise ValueError(f"a pattern, not {value!r} ({error})") from None
    return value


Include = Annotated[
    str | tuple[str, ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    Field(min_length=1),
    AfterValidator(_checked_patterns),
]
"""Which objects belong to a source: a pattern or a list of them; see `Patterns`."""

# ---------------------------------------------------------------------------------------- fields by extension


def _checked_fields(value: dict[str, str]) -> dict[str, str]:
    owner: dict[str, str] = {}
    for name, listed in value.items():
        extensions = _split_extensions(listed)
        if not name or not all(extensions):
            raise ValueError(f"extensions separated by ';', such as 'jpg;jpeg', not {name!r}: {listed!r}")
        for extension in extensions:
            if owner.setdefault(extension, name) != name:
                raise ValueError(f"each extension once, not {extension!r} for both {owner[extension]!r} and {name!r}")
    return value


def _split_extensions(listed: str) -> list[str]:
    return [part.strip().lower().removeprefix(".") for part in listed.split(";")]


Fields = Annotated[dict[str, str], Field(min_length=1), AfterValidator(_checked_fields)]
"""Name of a field -> its extensions, separated by ";"."""


class FieldMap:
    """Which field an extension (lower case, without the leading dot) belongs to.

    With `fields` None image extensions belong to `image`, those in `defaults` to the field given there, and every
    other one to a field of its own name.
    """

    def __init__(self, fields: Mapping[str, str] | None, defaults: Mapping[str, str] | None = None) -> None:
        self.names = None if fields is None else tuple(fields)
        self._fields: dict[str, str] = {}
        if fields is None:
            self._fields = dict.fromkeys(IMAGE_EXTENSIONS, "image") | dict(defaults or {})
        else:
            for name, listed in fields.items():
                self._fields |= dict.fromkeys(_split_extensions(listed), name)

    def field_of(self, extension: str) -> str | None:
        """The field; None if `fields` was given and has none for it."""
        return self._fields.get(extension, extension if self.names is None else None)

    def split_key(self, key: str) -> tuple[str, str] | None:
        """Field and extension by the end of a file's name: of "a.seg.png", "seg.png" if a field has it, else "png".

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
