"""Joins several files to a sample: files belong together if the wildcards in the patterns of `fields` match the same text."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import islice

from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.errors import SourceError, printable
from loaderkit.sources.listing import Listing
from loaderkit.sources.patterns import Patterns, said_of_form

_MAX_NAMED = 3


class _Files:
    """The files of one field, and the number of each by its stem.

    A file belongs to the pattern that gives it the shortest stem: 7_mask.png to *_mask.png, not to *.png.
    """

    def __init__(self, connector: Connector, field: str, patterns: Mapping[str, Patterns]) -> None:
        self.field = field
        self.numbers: dict[str, int] = {}
        self._patterns = patterns[field]
        self._others = [other for name, other in patterns.items() if name != field]
        self.listing = Listing(self._matching(connector))

    def _matching(self, connector: Connector) -> Iterator[ObjectInfo]:
        for info in connector.list(self._patterns.prefix):
            stem = self._patterns.stem(info.key)
            if stem is None or any(len(other) < len(stem) for other in self._stems_elsewhere(info.key)):
                continue
            if stem in self.numbers:
                raise SourceError(
                    f"two files of the field {self.field!r} ({self._patterns}) have the stem {stem!r}, of which one is "
                    f"{connector.describe(info.key)}: a sample has one file a field, so narrow the pattern"
                )
            self.numbers[stem] = len(self.numbers)
            yield info

    def _stems_elsewhere(self, key: str) -> list[str]:
        stems = [other.stem(key) for other in self._others]
        return [stem for stem in stems if stem is not None]

    def without(self, other: _Files) -> str | None:
        """How many files have no partner in `other`, and the names of the first; None if each has one."""
        alone = [number for stem, number in self.numbers.items() if stem not in other.numbers]
        if not alone:
            return None
        form = said_of_form(next(stem for stem in self.numbers if stem not in other.numbers), other.numbers)
        named = ", ".join(printable(self.listing.keys[number]) for number in alone[:_MAX_NAMED])
        more = ", ..." if len(alone) > _MAX_NAMED else ""
        return (
            f"{len(alone)} of {len(self.numbers)} files of {self.field!r} ({self._patterns}) have no {other.field!r} "
            f"({other._patterns}): {named}{more}{form}"
        )


def join_files(
    connector: Connector, fields: Mapping[str, str], limit: int | None, optional: Container[str] = ()
) -> dict[str, Listing]:
    """The files of every field (name -> pattern), sample by sample in the order of the first field's files.

    The files of the first field are all listed, also beyond `limit`. In place of a missing file of an `optional` field
    is the first field's file, with a size of 0. Raises `SourceError` that counts and names the files without a partner,
    and what listing raises.
    """
    patterns = {field: Patterns(pattern) for field, pattern in fields.items()}
    first, *others = (_Files(connector, field, patterns) for field in fields)
    missing = []
    for other in others:
        alone = [None if other.field in optional else first.without(other), other.without(first)]
        missing += [text for text in alone if text is not None]
    if missing:
        raise SourceError(
            f"{'; '.join(missing)}. Files belong together where the wildcards of their patterns stand for the same text: "
            "add the missing files, or narrow the patterns in `fields`"
        )
    joined = {first.field: first.listing}
    for other in others:
        joined[other.field] = Listing(islice(_partners(first, other), limit))
    return joined


def _partners(first: _Files, other: _Files) -> Iterator[ObjectInfo]:
    """The file of `other` for each of `first`."""
    for stem, number in first.numbers.items():
        if stem in other.numbers:
            yield other.listing[other.numbers[stem]]
        else:
            yield first.listing[number]._replace(size=0)
