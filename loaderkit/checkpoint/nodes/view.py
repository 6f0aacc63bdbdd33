"""What the folders of all nodes hold together: a pure function of their listings.

Files with the bytes of tensors have names that no other save has given, so any node's will do. Descriptions and manifests have
the same names in all saves of a step: those of a step are taken from one place, the newest whose manifest's files are all
there. Where there is none, the manifest is left out: that step is not whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.nodes.folder import AREAS, OWN, FolderListing
from loaderkit.checkpoint.save.placement import generation_of
from loaderkit.connectors.base import ObjectInfo

_STEP_FILE = re.compile(r"(step-\d+)/(.+)", re.DOTALL)


class HeldFile(NamedTuple):
    """A file, and one that holds it: the node's number, and the file's area there."""

    info: ObjectInfo
    node: int
    area: str


class NodesView(NamedTuple):
    """The files by key; and of each step with a manifest that is not whole, the files that no node has."""

    files: dict[str, HeldFile]
    missing: dict[str, list[str]]


class _StepPlace(NamedTuple):
    """The directory of a step in an area of a node."""

    node: int
    area: str
    files: dict[str, ObjectInfo]
    tables: list[dict[str, int]]

    @property
    def age(self) -> tuple[int, int, bool]:
        """The newest is the largest; of the same age the first node's own."""
        numbers = [generation_of(name) or 0 for table in self.tables for name in table]
        return max(numbers, default=-1), -self.node, self.area == OWN


def merged(listings: Mapping[int, FolderListing], here: int) -> NodesView:
    """The view of node `here`, which takes what it has itself from there."""
    order = sorted(listings, key=lambda node: (node != here, node))
    files: dict[str, HeldFile] = {}
    steps: dict[str, list[_StepPlace]] = defaultdict(list)
    for node in order:
        for area in AREAS:
            for step, place in _places(node, area, listings[node]):
                steps[step].append(place)
        for info in listings[node].files[OWN]:
            if not _STEP_FILE.fullmatch(info.key):
                files.setdefault(info.key, HeldFile(info, node, OWN))
    missing: dict[str, list[str]] = {}
    for step, places in steps.items():
        known, gone = _of_step(places)
        files |= {f"{step}/{name}": held for name, held in known.items()}
        if gone:
            missing[step] = gone
    return NodesView(files, missing)


def _places(node: int, area: str, listing: FolderListing) -> Iterator[tuple[str, _StepPlace]]:
    steps: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for info in listing.files[area]:
        if match := _STEP_FILE.fullmatch(info.key):
            steps[match[1]][match[2]] = info
    for step, files in steps.items():
        yield step, _StepPlace(node, area, files, listing.manifests[area].get(f"{step}/{NAME}", []))


def _of_step(places: Sequence[_StepPlace]) -> tuple[dict[str, HeldFile], list[str]]:
    """The files of a step by name, and those that are missing in the newest."""
    data: dict[str, HeldFile] = {}
    for node, area, files, _ in places:
        for name, info in files.items():
            is_longer = name not in data or data[name].info.size < info.size  # a file that was cut short is none
            if generation_of(name) is not None and is_longer:
                data[name] = HeldFile(info._replace(etag=f"{info.size:x}"), node, area)  # an etag that any copy has
    described = sorted((place for place in places if place.tables), key=lambda place: place.age, reverse=True)
    gone: list[str] = []
    for place in described:
        lacks = min((_lacking(table, place, data) for table in place.tables), key=len)
        if not lacks:
            return data | _small(place), []
        gone = gone or lacks
    first = described[0] if described else max(places, key=lambda place: place.age)
    small = _small(first)
    small.pop(NAME, None)
    return data | small, gone


def _lacking(table: Mapping[str, int], place: _StepPlace, data: Mapping[str, HeldFile]) -> list[str]:
    sizes = {name: held.info.size for name, held in data.items()}
    sizes |= {name: info.size for name, info in place.files.items() if generation_of(name) is None}
    return [name for name, size in table.items() if sizes.get(name) != size]


def _small(place: _StepPlace) -> dict[str, HeldFile]:
    """The files of one place that are no tensors'."""
    return {
        name: HeldFile(info, place.node, place.area)
        for name, info in place.files.items()
        if generation_of(name) is None
    }
