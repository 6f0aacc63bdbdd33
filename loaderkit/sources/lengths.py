"""The length of every sample, measured once and kept in the user's cache directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit._internal.system.user_cache import path_in_cache, replace_file

_VERSION = 2


class LengthIndex:
    """The file with the lengths of one source's samples after some stages; `made_of` identifies the source and the stages."""

    def __init__(self, cache_dir: Path, made_of: str) -> None:
        self._made_of = f"{_VERSION} {made_of}"
        self.path = path_in_cache(cache_dir, "lengths", self._made_of, ".npz")

    def load(self, num_samples: int) -> tuple[NDArray[np.int64], int] | None:
        """The lengths, int64 [samples], and how many samples were bad, whose length is 0; None if there is no such file, or it
        is damaged."""
        try:
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as parts:
                lengths: NDArray[np.int64] = parts["lengths"].astype(np.int64, casting="safe")
                num_bad = int(parts["num_bad"])
                is_right = str(parts["made_of"]) == self._made_of
        except Exception:  # a damaged zip raises one of a dozen exceptions
            return None
        fits = is_right and lengths.shape == (num_samples,) and bool(np.all(lengths >= 0))
        return (lengths, num_bad) if fits else None

    def save(self, lengths: NDArray[np.int64], num_bad: int) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        parts: dict[str, Any] = {"made_of": np.array(self._made_of), "lengths": lengths, "num_bad": np.array(num_bad)}
        replace_file(self.path, lambda file: np.savez(file, **parts))
