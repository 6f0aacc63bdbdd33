"""Keeps what listing files has found in the user's cache folder, where all processes of the machine share it.

`listing: keep` uses it while no folder has changed, `listing: 1d` for that long. A file that turns out to be another one than
was listed ends the run and removes what was kept, whatever `errors` says: the next start lists again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.kept.arrays import load_arrays, save_arrays
from loaderkit._internal.kept.folder_marks import CannotTellError, FolderMarks, TooYoungError
from loaderkit._internal.system.user_cache import default_cache_dir, path_in_cache
from loaderkit._internal.text import warn
from loaderkit.connectors.base import Connector, local_path_of, traits_of
from loaderkit.connectors.config import StoreArgs
from loaderkit.errors import ConfigError, ObjectChangedError, ObjectNotFoundError, ShortReadError, SourceError
from loaderkit.samples.chunk import SampleChunk
from loaderkit.sources.base import ReadContext
from loaderkit.sources.listing import Listing, StringTable

_VERSION = 1
_NOT_OF_THE_SAMPLES = {"listing", "retry", "cache", "read_ahead"}
_OUT_OF_DATE = (ObjectChangedError, ObjectNotFoundError, ShortReadError)


@dataclass(frozen=True)
class ListedFiles:
    """What listing has found: the samples' files, and of each its folder's number; see `FilesSource` for the rest."""

    files: Listing
    folders: Mapping[str, int]  # name -> number
    folder_ids: NDArray[np.int64]  # [files], or empty without classes
    partners: Mapping[str, Listing]
    extensions: tuple[tuple[str, str], ...]
    missing: Mapping[str, str]
    left_out: Mapping[str, int]
    num_of_systems: int
    takes_images: bool


class KeptListing:
    """Where the listing of one source is kept. `load` it, or `begin`, list, and `save`."""

    def __init__(self, connector: Connector, args: StoreArgs, max_age_s: float | None) -> None:
        """`max_age_s`: for how long it is used; None: until a folder has changed."""
        self._where = connector.describe("")
        self._root = local_path_of(connector)
        self._max_age_s = max_age_s
        settings = args.model_dump_json(exclude=_NOT_OF_THE_SAMPLES)
        self._made_of = json.dumps([_VERSION, self._root or "", self._where, traits_of(connector).store, settings])
        self.path = path_in_cache(default_cache_dir(), "listings", self._made_of, ".arrays")
        self._begun: tuple[float, FolderMarks | None] | None = None  # (time of the day, marks)

    @classmethod
    def of(cls, connector: Connector, args: StoreArgs, listing: str | float) -> KeptListing | None:
        """As `listing` says; None: it is listed at every start. Raises ConfigError."""
        if listing == "fresh":
            return None
        if traits_of(connector).is_in_process:
            raise ConfigError(
                f"source.listing: {connector.describe('')} lies in this process's memory, so nothing is kept of it: leave "
                "`listing` out"
            )
        if listing == "keep" and local_path_of(connector) is None:
            raise ConfigError(
                f"source.listing: keep is for folders of this machine, and nothing tells whether {connector.describe('')} has "
                "changed: say for how long a listing is used, as in `listing: 1d`, or leave it out"
            )
        return cls(connector, args, None if isinstance(listing, str) else listing)

    # ------------------------------------------------------------------------------------------------------ loading

    def load(self) -> ListedFiles | None:
        """What was kept, if it still holds; its arrays are shared with other processes."""
        found = load_arrays(self.path, self._made_of)
        if found is None:
            return None
        try:
            facts, arrays = found
            return _listed(facts, arrays) if self._holds(facts, arrays) else None
        except (KeyError, TypeError, ValueError):  # of a version that was never released
            return None

    def _holds(self, facts: Any, arrays: Mapping[str, NDArray[Any]]) -> bool:
        age_s: float = time.time() - facts["listed_s"]
        if self._max_age_s is not None:
            return 0 <= age_s < self._max_age_s
        paths = [*_table(arrays, "marks")]
        return bool(paths) and FolderMarks(paths, arrays["marks"].reshape(len(paths), 4)).hold()

    # ------------------------------------------------------------------------------------------------------- saving

    def begin(self) -> None:
        """Call before listing. Warns if it could not be told later whether the listing still holds."""
        self._begun = time.time(), None
        if self._max_age_s is not None or self._root is None:
            return
        try:
            self._begun = time.time(), FolderMarks.take(self._root)
        except TooYoungError:  # the next start keeps it
            self._begun = None
        except CannotTellError as error:
            self._begun = None
            warn(
                f"source.listing: keep: nothing is kept, so it is listed at every start: {error}. Say for how long a listing "
                "is used, as in `listing: 1d`, or leave it out"
            )
        except OSError:  # listing raises the error, if it stays
            self._begun = None

    def save(self, listed: ListedFiles) -> None:
        """Keep it, unless folders have changed since `begin`."""
        if self._begun is None:
            return
        listed_s, marks = self._begun
        if marks is not None and not marks.hold():
            return
        facts, arrays = _packed(listed)
        if marks is not None:
            _add_table(arrays, "marks", StringTable(marks.paths))
            arrays["marks"] = marks.marks.reshape(-1)
        if not save_arrays(self.path, self._made_of, facts | {"listed_s": listed_s}, arrays):
            warn(f"the listing of {self._where} could not be kept in {self.path.parent}: is the disk full?")

    # ------------------------------------------------------------------------------------------------------ reading

    def guarded(self, context: ReadContext) -> ReadContext:
        """The context of a reader whose errors show that the listing is out of date."""
        return replace(context, failed=Guard(context.failed, str(self.path), self._where))


@dataclass(frozen=True)
class Guard:
    """`failed` of a `ReadContext`. Raises SourceError for a file that is not as it was listed, and removes the listing."""

    failed: Any
    path: str
    where: str

    def __call__(self, chunk: SampleChunk, row: int, error: BaseException) -> None:
        """See `ReadContext.failed`."""
        if not isinstance(error, _OUT_OF_DATE):
            self.failed(chunk, row, error)
            return
        with suppress(OSError):
            os.unlink(self.path)
        raise SourceError(
            f"{error}. The listing of {self.where} was kept (`source.listing`) and is out of date. It was removed from "
            f"{self.path}: start again, and it is listed anew"
        ) from error


# ------------------------------------------------------------------------------------------------------------ as arrays


def _packed(listed: ListedFiles) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    arrays: dict[str, NDArray[Any]] = {"folder_ids": listed.folder_ids}
    for number, files in enumerate([listed.files, *listed.partners.values()]):
        _add_table(arrays, f"keys-{number}", files.keys)
        _add_table(arrays, f"etags-{number}", files.etags)
        arrays[f"sizes-{number}"] = files.sizes
    facts = {
        "folders": dict(listed.folders),
        "partners": [*listed.partners],
        "extensions": listed.extensions,
        "missing": dict(listed.missing),
        "left_out": dict(listed.left_out),
        "num_of_systems": listed.num_of_systems,
        "takes_images": listed.takes_images,
    }
    return facts, arrays


def _listed(facts: Any, arrays: Mapping[str, NDArray[Any]]) -> ListedFiles:
    listings = [
        Listing.packed(_table(arrays, f"keys-{number}"), arrays[f"sizes-{number}"], _table(arrays, f"etags-{number}"))
        for number in range(1 + len(facts["partners"]))
    ]
    return ListedFiles(
        listings[0],
        facts["folders"],
        arrays["folder_ids"],
        dict(zip(facts["partners"], listings[1:], strict=True)),
        tuple((field, extension) for field, extension in facts["extensions"]),
        facts["missing"],
        facts["left_out"],
        facts["num_of_systems"],
        facts["takes_images"],
    )


def _add_table(arrays: dict[str, NDArray[Any]], name: str, table: StringTable) -> None:
    arrays[f"{name}-bytes"], arrays[f"{name}-ends"] = table.parts


def _table(arrays: Mapping[str, NDArray[Any]], name: str) -> StringTable:
    return StringTable.packed(arrays[f"{name}-bytes"].data, arrays[f"{name}-ends"])
