"""The length of every sample, measured once and kept in the user's cache directory."""

from __future__ import annotations

import os
import secrets
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_VERSION = 2


class LengthIndex:
    """The file of the lengths of one source's samples behind some stages; `made_of` says of which."""

    def __init__(self, cache_dir: Path, made_of: str) -> None:
        self._made_of = f"{_VERSION} {made_of}"
        digest = blake2b(self._made_of.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        self.path = Path(cache_dir) / "lengths" / f"{digest}.npz"

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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.stem}.{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb") as file:
                np.savez(file, made_of=np.array(self._made_of), lengths=lengths, num_bad=num_bad)
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
