"""Where the benchmark's data lies, and what is in it. Imports nothing, so that every environment can."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TOKEN_STEP = 40503  # neighbouring tokens differ by it, modulo 2 ** 16, so that any window can be checked
RECORD_BASE = 1009  # record i is (i, i mod 1009, i div 1009, 7)
ROW = 128  # floats in a row of a large array
WINDOW = 2049


@dataclass(frozen=True)
class Places:
    """The folders and files below `root`."""

    root: Path

    @property
    def photos(self) -> Path:
        """JPEGs of about 56 kB, one folder a class."""
        return self.root / "photos"

    @property
    def shards(self) -> Path:
        """The same in tar archives, `key.jpg` and `key.cls`."""
        return self.root / "shards"

    @property
    def small_shards(self) -> Path:
        """Many small samples in tar archives: `key.txt` of about 1 kB and `key.cls`."""
        return self.root / "small-shards"

    @property
    def records(self) -> Path:
        """float32 [N, 4]."""
        return self.root / "records" / "records.npy"

    @property
    def npy(self) -> Path:
        """Eight large float32 arrays [rows, 128], `array-0.npy` to `array-7.npy`; array k holds k + row / 2 ** 20."""
        return self.root / "npy"

    @property
    def npz(self) -> Path:
        """The same, each as the member `data` of an uncompressed archive."""
        return self.root / "npz"

    @property
    def tokens(self) -> Path:
        """uint16, raw."""
        return self.root / "tokens" / "tokens.bin"

    @property
    def large_photos(self) -> Path:
        """JPEGs of 12 megapixels, one folder a class."""
        return self.root / "large-photos"

    @property
    def litdata(self) -> Path:
        """The photos in litdata's chunks, as bytes."""
        return self.root / "litdata"

    @property
    def mosaic(self) -> Path:
        """The photos in Mosaic's MDS shards, as bytes."""
        return self.root / "mosaic"


def labelled(folder: Path) -> list[tuple[Path, int]]:
    """Every JPEG below the class folders, with the place of its class among their sorted names."""
    classes = sorted(path.name for path in folder.iterdir())
    return [(path, classes.index(path.parent.name)) for path in sorted(folder.rglob("*.jpg"))]
