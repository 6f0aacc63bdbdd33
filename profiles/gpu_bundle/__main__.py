"""Make what is carried to a machine with a GPU and without a network, whose Python has torch, numpy and the like:

    python3.12 -m profiles.gpu_bundle          # of the version that the machine has

    .gpu-bundle/base/   our C modules with libjpeg beside them, and the wheels that are missing there
    .gpu-bundle/dali/   DALI with nvImageCodec and nvJPEG, cut to what a Python and a GPU of one kind run, and its wheels

The files of the repository travel too. `unpack.py` installs what was carried; it takes any part of the bundle.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from profiles.gpu_bundle.fatbin import cut

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / ".gpu-bundle"
WORK = ROOT / "build" / "gpu_bundle"
CALL_BYTES = 64 * 2**20

# With what they need, less what is there.
BASE = ("pydantic>=2.7", "ruamel.yaml>=0.18", "simplejpeg>=1.8.1")
THERE = ("numpy-*",)
# Not all that DALI asks for: the rest is for readers and modules that loaderkit does not use.
DALI = ("nvidia-dali-cuda130==2.4.*", "nvidia-nvimgcodec-cu13==0.9.*", "nvidia-nvjpeg>=13.2")
BESIDE_DALI = ("gast<=0.7.0", "astunparse<=1.6.3", "optree")

_TAG = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
_LEFT_OUT = (
    "*/include/*",
    "*/Acknowledgements.txt",
    "nvidia/nvimgcodec/nvimgcodec_impl.*",  # for Python, which DALI does without
    "nvidia/nvimgcodec/tools/*",
    "*/lib*tiff_ext.so*",
    "*/libnvjpeg2k_ext.so*",
)
_ALONE = "nvidia/dali/libdali_operators.so"  # nearly half of it, so it is a part by itself
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


def pip(*arguments: str) -> None:
    """Raises CalledProcessError, after what pip said."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    subprocess.run(command, check=True)


def download(target: Path, *requirements: str, alone: bool = False) -> list[Path]:
    """The wheels for these, with what they need or `alone`."""
    target.mkdir(parents=True, exist_ok=True)
    pip("download", "--only-binary=:all:", "--dest", str(target), *(["--no-deps"] if alone else []), *requirements)
    return sorted(target.glob("*.whl"))


def build_native(target: Path) -> None:
    """Our C modules, and libjpeg, which they look for beside themselves. Raises SystemExit where one of them is not built."""
    tools, built = WORK / "setuptools", WORK / "native"
    pip("install", "--upgrade", "--target", str(tools), "setuptools>=77")
    environ = os.environ | {"PYTHONPATH": str(tools), "LDFLAGS": "-Wl,-rpath,$ORIGIN"}
    build = ["--quiet", "build_ext", "--force", "--build-lib", str(built), "--build-temp", str(WORK / "objects")]
    subprocess.run(
        [sys.executable, "-c", "from setuptools import setup; setup()", *build], cwd=ROOT, env=environ, check=True
    )
    modules = {name: next(built.glob(f"loaderkit/native/{name}.{_TAG}*.so"), None) for name in ("_kernels", "_jpeg")}
    for name, module in modules.items():
        if module is None:
            raise SystemExit(
                f"{name} was not built; it needs a C compiler, and the headers of Python and of libjpeg-turbo"
            )
        shutil.copy2(module, target)
    linked = subprocess.run(["ldd", str(modules["_jpeg"])], capture_output=True, text=True, check=True).stdout
    libjpeg = re.search(r"(libjpeg\.so\S*) => (\S+)", linked)
    if libjpeg is None:
        raise SystemExit(f"libjpeg was not found: {linked}")
    shutil.copyfile(libjpeg[2], target / libjpeg[1])


def wanted(name: str) -> bool:
    """True for a file of a wheel that loaderkit's pipelines need."""
    other_python = ".cpython-" in name and _TAG not in name
    return not other_python and not any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_OUT)


def members(wheels: list[Path], architecture: int, *, operators: bool) -> Iterator[tuple[str, bytes]]:
    """The files of the wheels that are carried, cut: the one that is a part by itself, or all others."""
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith("/") or not wanted(name) or (name == _ALONE) != operators:
                    continue
                data = bytearray(wheel.read(name))
                if ".so" in name:
                    cut(data, architecture)
                yield name, bytes(data)


def pack(target: Path, wheels: list[Path], architecture: int, *, operators: bool) -> None:
    """Write an archive of what is carried of the wheels."""
    with lzma.open(target, "wb", filters=_FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in members(wheels, architecture, operators=operators):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def size_of(folder: Path) -> int:
    """In bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tree_bytes() -> int:
    """What travels of the repository by itself."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    paths = [ROOT / os.fsdecode(name) for name in names if name]
    return sum(path.lstat().st_size for path in paths if path.exists())


def make_base() -> None:
    """`.gpu-bundle/base`."""
    base = BUNDLE / "base"
    shutil.rmtree(base, ignore_errors=True)
    (base / "native").mkdir(parents=True)
    build_native(base / "native")
    for wheel in download(base / "wheels", *BASE):
        if any(fnmatch.fnmatch(wheel.name, pattern) for pattern in THERE):
            wheel.unlink()


def make_dali(architecture: int) -> None:
    """`.gpu-bundle/dali`."""
    dali = BUNDLE / "dali"
    shutil.rmtree(dali, ignore_errors=True)
    download(dali, *BESIDE_DALI, alone=True)
    wheels = download(WORK / "wheels", *DALI, alone=True)
    with ProcessPoolExecutor(2) as pool:
        parts = {"operators": True, "rest": False}
        for done in [
            pool.submit(pack, dali / f"{name}.tar.xz", wheels, architecture, operators=operators)
            for name, operators in parts.items()
        ]:
            done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--architecture", type=int, default=90, help="of the GPU: 90 for sm_90, which is Hopper's (default)"
    )
    parser.add_argument("--part", choices=("base", "dali"), help="make only this part anew")
    arguments = parser.parse_args()
    if arguments.part != "dali":
        make_base()
    if arguments.part != "base":
        make_dali(arguments.architecture)
    sizes = {"the repository": tree_bytes(), "base": size_of(BUNDLE / "base"), "dali": size_of(BUNDLE / "dali")}
    for name, num_bytes in sizes.items():
        print(f"{name:15}{num_bytes / 2**20:6.1f} MiB")
    total = sum(sizes.values())
    print(f"{'together':15}{total / 2**20:6.1f} MiB of the {CALL_BYTES >> 20} that one call carries")
    if total > CALL_BYTES:
        print("so carry .gpu-bundle/dali/operators.tar.xz in a call before the others, and unpack it there")


if __name__ == "__main__":
    main()
