"""The virtual environments of the peers: `.peers/<name>/`, one each, so that what they depend on never meets ours.

    python -m profiles.peers.environments [NAME ...]

`requirements/<name>.txt` says what goes into one; what stands in `<name>.alone.txt` is installed without its dependencies.
A complete environment bears a stamp with a digest of both files, and is made anew when they change.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
OWN = "loaderkit"  # no environment is made for it: the interpreter that runs the harness has it


def names() -> list[str]:
    """Every environment there is a list of requirements for."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt") if not path.stem.endswith(".alone"))


def python_of(name: str) -> Path:
    """The interpreter of an environment, whether it exists or not."""
    return Path(sys.executable) if name == OWN else ROOT / ".peers" / name / "bin" / "python"


def make(name: str) -> None:
    """Create the environment unless it is there and complete. Raises CalledProcessError."""
    folder = ROOT / ".peers" / name
    lists = [path for path in (REQUIREMENTS / f"{name}.txt", REQUIREMENTS / f"{name}.alone.txt") if path.exists()]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in lists)).hexdigest()
    stamp = folder / ".complete"
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"environment {name}: {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    for path in lists:
        alone = ["--no-deps"] if path.stem.endswith(".alone") else []
        command = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            *alone,
            "--requirement",
            str(path),
        ]
        subprocess.run(command, check=True)
    _offer_ffmpeg(folder)
    stamp.write_text(digest)


def environ_of(name: str) -> dict[str, str]:
    """What processes of an environment need besides its interpreter."""
    libraries = ROOT / ".peers" / name / "ffmpeg"
    return {"LD_LIBRARY_PATH": str(libraries)} if libraries.is_dir() else {}


def _offer_ffmpeg(folder: Path) -> None:
    """Show the FFmpeg libraries of PyAV, if it was installed, under the names by which others look for them.

    libavutil-1234abcd.so.60.8.100 becomes libavutil.so.60; under their own names they find one another.
    """
    for path in folder.glob("lib/python*/site-packages/av.libs/lib*.so*"):
        place = folder / "ffmpeg"
        place.mkdir(exist_ok=True)
        (place / path.name).symlink_to(Path("..") / path.relative_to(folder))
        match = re.fullmatch(r"(lib(?:av|sw)\w+)-[0-9a-f]+\.so\.(\d+)[.\d]*", path.name)
        if match:
            (place / f"{match[1]}.so.{match[2]}").symlink_to(path.name)


def main() -> int:
    """Make those named, or all; the others go on when one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*names(), []], help="default: all of them")
    failed = []
    for name in parser.parse_args().names or names():
        try:
            make(name)
        except subprocess.CalledProcessError as error:
            print(f"environment {name} is not complete: {error}", file=sys.stderr)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
