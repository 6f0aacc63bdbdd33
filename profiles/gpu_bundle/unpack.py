"""Install what was carried, with nothing but Python:

    python3 profiles/gpu_bundle/unpack.py BUNDLE SITE

The wheels and archives below the folder BUNDLE, as far as they were carried, are unpacked into the folder SITE, which then
belongs into PYTHONPATH; the C modules go into the loaderkit beside this script.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "loaderkit" / "native"


def unpack(path: Path, site: Path) -> None:
    """Unpack one wheel or archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(site)
    else:
        with tarfile.open(path) as archive:
            archive.extractall(site, filter="data")


def main() -> None:
    """Unpack all; one process each, for xz gives 100 MB/s on one CPU."""
    bundle, site = map(Path, sys.argv[1:])
    packed = [*bundle.rglob("*.tar.xz"), *bundle.rglob("*.whl")]
    (site / "nvidia" / "dali").mkdir(parents=True, exist_ok=True)  # processes that make it at the same time may fail
    with ProcessPoolExecutor() as pool:
        for done in [pool.submit(unpack, path, site) for path in packed]:
            done.result()
    for module in bundle.glob("base/native/*"):
        shutil.copy2(module, NATIVE)


if __name__ == "__main__":
    main()
