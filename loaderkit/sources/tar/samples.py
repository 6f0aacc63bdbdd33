"""Groups the members of a tar into samples, as WebDataset does: adjacent members that share a name up to its first dot."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loaderkit import native
from loaderkit.errors import SourceError
from loaderkit.sources.formats.tar_index import TarIndex
from loaderkit.sources.formats.tar_index.index import Damage, sample_key_and_extension
from loaderkit.sources.listing import StringTable

# Names of WebDataset's metadata: a file, or anything below a folder, named `__...__` at the top of the archive.
_META = re.compile(r"__[^/]*__($|/)")


class TarSamples(NamedTuple):
    """The samples of one archive: members per sample, and for each member its index in the archive and the id of its
    extension."""

    keys: StringTable
    counts: NDArray[np.int64]
    members: NDArray[np.int64]
    extensions: NDArray[np.int32]

    def head(self, num: int) -> TarSamples:
        counts = self.counts[:num]
        num_members = int(counts.sum())
        return TarSamples(self.keys.head(num), counts, self.members[:num_members], self.extensions[:num_members])


def group_members(index: TarIndex, archive: str, extension_ids: dict[str, int]) -> tuple[TarSamples, int]:
    """The samples of one archive, and how many members belong to none. New extensions are added to `extension_ids`.

    One pass over the names, in C if they are regular. Raises `SourceError`, which names the `archive`, if the members of a
    sample are not adjacent, or two of them have the same extension.
    """
    grouped = native.group_names(index.packed_names, len(index))
    if grouped is None:
        return _group_by_name(index, archive, extension_ids)
    keys, ends, counts, members, extensions, names, num_ignored, are_ascending = grouped
    table = StringTable.packed(keys, np.frombuffer(ends, np.int64))
    if not are_ascending and len({*table.take(np.arange(len(table)))}) < len(table):
        return _group_by_name(index, archive, extension_ids)  # it raises the error
    ids = np.array([_id_of(name, extension_ids) for name in names], np.int32)
    samples = TarSamples(
        table,
        np.frombuffer(counts, np.int64),
        np.frombuffer(members, np.int64),
        ids[np.frombuffer(extensions, np.int32)],
    )
    return samples, num_ignored


def before_damage(
    samples: TarSamples,
    damage: Damage,
    fields_of: Callable[[NDArray[np.int32]], set[str | None]],
    wanted: Collection[str] | None,
) -> TarSamples:
    """Without the last sample, if it may have lost a member to the damage behind it.

    The name of the damaged member decides, where it is known. Else the sample must have all fields of the one before
    it, or, if it is the only one, the fields `wanted`.
    """
    if not len(samples.keys):
        return samples
    next_key = None if damage.next_name is None else sample_key_and_extension(damage.next_name)
    if next_key is not None:
        is_whole = next_key[0] != samples.keys[-1]
    else:
        ends = np.cumsum(samples.counts)
        begin = int(ends[-1] - samples.counts[-1])
        last = fields_of(samples.extensions[begin:])
        expected: set[str | None] | None = None if wanted is None else {*wanted}
        if len(ends) > 1:
            expected = fields_of(samples.extensions[int(begin - samples.counts[-2]) : begin])
        is_whole = expected is not None and last >= expected
    return samples if is_whole else samples.head(len(samples.keys) - 1)


def _id_of(extension: str, ids: dict[str, int]) -> int:
    return ids.setdefault(extension, len(ids))


def _group_by_name(index: TarIndex, archive: str, extension_ids: dict[str, int]) -> tuple[TarSamples, int]:
    """`group_members` name by name, for irregular archives."""
    counts: dict[str, int] = {}  # by key
    members, ids = array("q"), array("i")
    num_ignored = 0
    last = ""  # the key of the latest member's sample, with its dot
    seen: set[int] = set()  # its extensions
    for number, name in enumerate(index.names()):
        if last and name.startswith(last) and "/" not in name[len(last) :]:
            extension = name[len(last) :].lower()
        else:
            if name.startswith("__") and _META.match(name):
                continue
            base = name.rfind("/") + 1
            dot = name.find(".", base)
            if dot <= base or dot == len(name) - 1:
                num_ignored += 1
                continue
            key, extension, last = name[:dot], name[dot + 1 :].lower(), name[: dot + 1]
            if key in counts:
                raise SourceError(
                    f"{archive}: sample {key!r} continues with {name!r} after other samples; a sample's members must be "
                    "adjacent: create the archive with its members sorted by name (tar --sort=name)"
                )
            counts[key], seen = 0, set()
        extension_id = _id_of(extension, extension_ids)
        if extension_id in seen:
            raise SourceError(
                f"{archive}: sample {last[:-1]!r} has the extension {extension!r} twice (upper and lower case count as the "
                "same); give each member its own name"
            )
        seen.add(extension_id)
        members.append(number)
        ids.append(extension_id)
        counts[last[:-1]] += 1
    samples = TarSamples(
        StringTable(counts),
        np.array([*counts.values()], np.int64),
        np.array(members, np.int64),
        np.array(ids, np.int32),
    )
    return samples, num_ignored
