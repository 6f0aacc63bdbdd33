"""A process that takes a folder of odd files through everything that reads data, while an audit hook notes what data must
never bring about. Run by test_nothing_executes.py: `odd_guard.py FOLDER REPORT [misbehave]`."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import io
import json
import os
import pickle
import shutil
import socket
import sys
import tarfile
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RUN = {
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
    "pty.spawn", "socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request", "ftplib.connect",
    "webbrowser.open", "ctypes.dlopen", "cpython.run_command", "cpython.run_file", "cpython.run_string",
    "cpython.run_module", "pickle.find_class", "shutil.unpack_archive", "os.kill",
}  # fmt: skip
CHANGES = {
    "os.remove",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "os.chown",
    "os.truncate",
}
OTHERS = ("/etc/passwd", "escaped")  # what odd files name besides programs and modules

COMPILING = {
    ast.__file__, typing.__file__, collections.__file__, dataclasses.__file__, "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
}  # fmt: skip
"""Literals of arrays' headers, annotations, and classes are compiled; modules of known packages, too."""


class Guard:
    """Notes forbidden events once `is_on`. What is written below `folder` is allowed, and modules of packages known by then."""

    def __init__(self, folder: Path) -> None:
        self.is_on = False
        self.seen: Counter[str] = Counter()
        self.where = ""
        self._folder = str(folder)
        self._packages: set[str] = set()
        self._checks: dict[str, Callable[[tuple[Any, ...]], object]] = {
            **dict.fromkeys(RUN, self._forbidden), **dict.fromkeys(CHANGES, self._change), "open": self._open,
            "import": self._import, "compile": self._compile, "exec": self._compile,
        }  # fmt: skip

    def __call__(self, event: str, values: tuple[Any, ...]) -> None:
        if self.is_on and event in self._checks and self._checks[event](values):
            self.seen[f"{self.where}: {event}{values!r}"[:200]] += 1

    def arm(self) -> None:
        self._packages = {name.partition(".")[0] for name in sys.modules}
        self.is_on = True

    def _forbidden(self, values: tuple[Any, ...]) -> bool:
        return True

    def _change(self, values: tuple[Any, ...]) -> bool:
        return any(self._is_outside(value) for value in values if isinstance(value, (str, bytes, os.PathLike)))

    def _is_outside(self, path: Any) -> bool:
        place = os.path.realpath(os.fsdecode(path))
        return not place.startswith((self._folder + "/", "/dev/null")) and place != self._folder

    def _open(self, values: tuple[Any, ...]) -> bool:
        path, mode, flags = values
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        name = os.fsdecode(path)
        is_write = (
            bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if mode is None else bool(set(mode) & set("wax+"))
        )
        return any(os.path.realpath(name).endswith(other) for other in OTHERS) or (is_write and self._is_outside(name))

    def _import(self, values: tuple[Any, ...]) -> bool:
        return str(values[0]).partition(".")[0] not in self._packages

    def _compile(self, values: tuple[Any, ...]) -> bool:
        return sys._getframe(2).f_code.co_filename not in COMPILING


ROOT = Path(__file__).parents[2]
NAMES = (
    "x.pt", "x.bin", "x.ckpt", "x.safetensors", "x.tar", "d/.metadata", "d/model.safetensors.index.json",
    "d/pytorch_model.bin.index.json", "d/x-00001-of-00001.safetensors", "d/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "d/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
)  # fmt: skip


class Ways:
    """Everything that reads data. `failures` counts the errors by type; all that are not named ones are `raw`."""

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.folder = folder
        self.guard = guard
        self.failures: Counter[str] = Counter()
        self.raw: Counter[str] = Counter()

    @contextlib.contextmanager
    def trying(self, where: str) -> Iterator[None]:
        from loaderkit.errors import LoaderkitError

        self.guard.where = where
        try:
            yield
        except LoaderkitError as error:
            self.failures[type(error).__name__] += 1
        except Exception as error:
            self.raw[f"{where.partition(' ')[0]}: {type(error).__name__}: {error}"[:200]] += 1

    def all(self, files: Path, others: Path | None = None) -> None:
        """The files of a folder, in pipelines beside `others`, as a batch of bad samples alone is an error."""
        paths = sorted(files.iterdir())
        if others is not None:
            shutil.copytree(others, files, dirs_exist_ok=True)
        for extension in sorted({path.suffix for path in files.iterdir()}):
            self.pipelines(files, extension)
        self.shards(paths)
        for path in paths:
            self.decoded(path)
            self.restored(path)
            self.contained(path)
            self.commanded(path)

    def pipelines(self, files: Path, extension: str) -> None:
        """`loaderkit.build` and `loaderkit check` of all files of an extension, in one batch."""
        import loaderkit

        for executor in ("inline", "thread"):
            stages: list[Any] = ["read", "decode", {"batch": {"size": len([*files.glob(f"*{extension}")])}}]
            if extension[1:] in PICTURES:
                stages.insert(2, {"center_crop": {"size": 8}})
            quarantine = str(self.folder / "bad.jsonl")
            description = {
                "source": {"kind": "files", "url": str(files), "include": f"*{extension}"},
                "stages": stages,
                "prefetch": {"executor": executor},
                "errors": {"on_bad_sample": "skip", "max_bad_samples": 10**6, "quarantine": quarantine},
            }
            path = self.folder / f"{extension}.yaml"
            path.write_text(json.dumps(description))
            with self.trying(f"build {extension} {executor}"), loaderkit.build(path) as loader:
                next(iter(loader))
            self.command("check", str(path))

    def decoded(self, path: Path) -> None:
        """The stage itself, with all its options, under the file's own name and as a picture."""
        from loaderkit.samples.values import Encoded
        from loaderkit.stages.image.decode import DecodeArgs, decode
        from loaderkit.stages.media.audio import AudioArgs
        from loaderkit.stages.media.video import VideoArgs

        for args in (
            DecodeArgs(),
            DecodeArgs(exif_orientation=True),
            DecodeArgs(masks=("x",)),
            DecodeArgs(fields=("x",)),
            DecodeArgs(video=VideoArgs(frames=2), audio=AudioArgs()),
        ):
            for extension in {path.suffix[1:], *(("mp4", "mp3") if args.has_media else ("jpg", "png"))}:
                data = memoryview(path.read_bytes())
                value: Any = data if args.fields else Encoded(data, extension)
                with self.trying(f"decode {path.name} as {extension}"), contextlib.suppress(ValueError):
                    decode(args)({"x": value})

    def shards(self, paths: list[Path]) -> None:
        """All of them as members of a good shard, and each as a shard and as an index."""
        import loaderkit
        from loaderkit.connectors.memory import MemoryConnector
        from loaderkit.sources.formats.tar_index import load_index

        place = self.folder / "shards"
        place.mkdir(exist_ok=True)
        shard = place / "good.tar"
        with tarfile.open(shard, "w") as tar:
            for number, path in enumerate(paths):
                info = tarfile.TarInfo(f"{number:05}{path.suffix}")
                info.size = path.stat().st_size
                tar.addfile(info, io.BytesIO(path.read_bytes()))
        for extension in sorted({path.suffix[1:] for path in paths}):
            source = {"kind": "tar", "url": str(shard), "fields": {"x": extension}}
            stages = ["read", "decode", {"batch": {"size": len(paths)}}]
            errors = {"on_bad_sample": "skip", "max_bad_samples": 10**6}
            with self.trying(f"tar {extension}"):
                loader = loaderkit.build({"source": source, "stages": stages, "errors": errors})
                with loader:
                    next(iter(loader), None)
        good = shard.read_bytes()[:20480]
        for path in paths:
            connector = MemoryConnector({"a.tar": path.read_bytes(), "b.tar": good, "b.idx": path.read_bytes()})
            for key in ("a.tar", "b.tar"):
                with self.trying(f"index {path.name} as {key}"):
                    load_index(connector, connector.stat(key), self.folder / "cache")
            shutil.copy(path, place / "odd.tar")
            shutil.copy(path, place / "good.idx")
            self.command("index", str(place / "odd.tar"))
            self.command("index", "--check", str(shard))

    def restored(self, path: Path) -> None:
        """As a checkpoint under every format's name; its manifest; a manifest that it is itself."""
        import loaderkit
        from loaderkit.checkpoint import latest, write_manifest
        from loaderkit.connectors.memory import MemoryConnector

        data = path.read_bytes()
        for name in NAMES:
            objects = {name: data, "good.safetensors": GOOD}
            if name.startswith("d/"):
                objects |= {"d/__0_0.distcp": data, "d/model-00001-of-00001.safetensors": GOOD}
            if "zero" in name:
                objects = {**self.stored("d"), name: data}
            connectors = {"memory": MemoryConnector(objects)}
            url = f"memory://{name.partition('/')[0]}"
            for nested in (False, True):
                with self.trying(f"restore {path.name} as {name}"):
                    loaderkit.restore(url, connectors=connectors, concurrency=1, nested=nested)
            with self.trying(f"manifest {path.name} as {name}"):
                write_manifest(url, connectors=connectors)
        given = {"memory": MemoryConnector({"x.safetensors": GOOD, "x.safetensors.loaderkit-manifest.json": data})}
        with self.trying(f"restore with manifest {path.name}"):
            loaderkit.restore("memory://x.safetensors", connectors=given, concurrency=1)
        place = self.folder / "checkpoints" / "step-1"
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place / (".metadata" if path.suffix == ".metadata" else path.name))
        with self.trying(f"restore {path.name}"):
            loaderkit.restore(place / path.name, concurrency=1)
        with self.trying(f"latest {path.name}"):
            latest(place.parent)
        with self.trying(f"manifest {path.name}"):
            write_manifest(place / path.name)
        shutil.rmtree(place)

    def stored(self, name: str) -> dict[str, bytes]:
        """The files of a good store or folder by key."""
        place = self.folder / "stores"
        return {f"{file.relative_to(place)}": file.read_bytes() for file in (place / name).rglob("*") if file.is_file()}

    def contained(self, path: Path) -> None:
        """As an HDF5 file; as the metadata and as a chunk of Zarr, in a store that is whole besides."""
        import loaderkit
        from loaderkit.connectors.memory import MemoryConnector

        data = path.read_bytes()
        tries = [("hdf5", "x.h5"), *(("zarr", f"x.zarr/x/{name}") for name in ("zarr.json", ".zarray", "c/0"))]
        for kind, key in tries:
            objects = {key: data} if kind == "hdf5" else {**self.stored("x.zarr"), key: data}
            if key.endswith(".zarray"):
                del objects["x.zarr/x/zarr.json"]
            for samples in ("rows", "whole"):
                source = {
                    "kind": kind,
                    "url": f"memory://{key.partition('/')[0]}",
                    "samples": samples,
                    "fields": {"x": "x"},
                }
                with self.trying(f"{kind} {path.name} as {key}"):
                    description = {"source": source, "stages": ["read", {"batch": {"size": 1}}]}
                    with loaderkit.build(description, connectors={"memory": MemoryConnector(objects)}) as loader:
                        next(iter(loader), None)

    def commanded(self, path: Path) -> None:
        """As what a command may be given: a checkpoint, an array, a pipeline, a state, a quarantine file, a report."""
        import loaderkit

        good = str(self.folder / "good.yaml")
        source = {"kind": "array", "url": str(path)}
        with self.trying(f"array {path.name}"):
            loaderkit.build({"source": source, "stages": ["read", {"batch": {"size": 1}}]}).close()
        self.command("restore", str(path), "--list")
        self.command("check", str(path))
        self.command("run", good, "--resume", str(path))
        self.command("run", good, "--only-quarantined", str(path))
        self.command("profile", good, "--baseline", str(path), "--steps", "x")

    def command(self, *arguments: str) -> None:
        from loaderkit.cli import main

        with self.trying("command " + " ".join(arguments)):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
                main(arguments)
            if "--debug shows where" in said.getvalue():
                self.raw[f"command {arguments[0]}: {said.getvalue()[-200:]}"] += 1


PICTURES = ("jpg", "jpeg", "png", "webp", "tif", "tiff", "gif", "bmp", "ppm")
GOOD = b"\x40\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(64) + bytes(8)


def good_files(folder: Path) -> Path:
    """One of each kind that can be read: what is imported for them is imported before the guard is on."""
    import numpy as np
    import torch
    from PIL import Image

    folder.mkdir()
    good = {
        "source": {"kind": "files", "url": str(folder), "include": "*.jpg"},
        "stages": ["read", "decode", {"batch": {"size": 1}}],
    }
    (folder.parent / "good.yaml").write_text(json.dumps(good))
    for extension in PICTURES:
        kind = {"jpg": "JPEG", "tif": "TIFF", "ppm": "PPM"}.get(extension)
        Image.linear_gradient("L").convert("RGB").save(folder / f"good.{extension}", kind)
    import h5py
    import zarr
    from deepspeed_folders import write_zero

    with h5py.File(folder / "good.h5", "w") as file:
        file.create_dataset(
            "x", data=np.zeros((8, 8)), chunks=(4, 8), compression="gzip", shuffle=True, fletcher32=True
        )
    stores = folder.parent / "stores"
    zarr.create_array(stores / "x.zarr", name="x", data=np.zeros(8), chunks=(4,), fill_value=1)
    states = {"exp_avg": {"a": torch.zeros(3)}}
    write_zero(stores / "d", 3, 1, [{"a": torch.ones(3)}], states, frozen={}, buffers={}, tied={})
    np.save(folder / "good.npy", np.zeros(3))
    np.savez_compressed(folder / "good.npz", a=np.zeros(3))
    (folder / "good.safetensors").write_bytes(GOOD)
    torch.save({"a": torch.zeros(3), "b": [1, "x"]}, folder / "good.pt")
    for extension, text in (("json", "{}"), ("txt", "a"), ("cls", "1"), ("yaml", "a: 1"), ("bin", "x")):
        (folder / f"good.{extension}").write_text(text)
    with tarfile.open(folder / "good.tar", "w") as tar:
        tar.add(folder / "good.jpg", "0.jpg")
    return folder


def misbehave(guard: Guard, files: Path) -> None:
    """What readers that trust their data do. A file's name says with which it is read."""
    import numpy as np
    import torch
    from PIL import Image
    from ruamel.yaml import YAML

    acts: dict[str, Callable[[Path], Any]] = {
        "pickle": lambda path: pickle.loads(path.read_bytes()),
        "numpy": lambda path: np.load(path, allow_pickle=True),
        "torch": lambda path: torch.load(path, weights_only=False),
        "yaml": lambda path: YAML(typ="unsafe", pure=True).load(path.read_text()),
        "tar": lambda path: tarfile.open(path).extractall(files, filter="fully_trusted"),  # noqa: SIM115
        "eval": lambda path: eval(path.read_text()),
        "pillow": lambda path: Image.open(path).load(),
        "read": lambda path: Path(path.read_text()).read_bytes(),
        "fetch": lambda path: socket.create_connection(("127.0.0.1", 9), 1),
    }
    for path in sorted(files.iterdir()):
        guard.where = path.name
        with contextlib.suppress(Exception):
            acts[path.name.partition("-")[0]](path)


def main(folder: Path, report: Path, *what: str) -> None:
    guard = Guard(folder)
    sys.addaudithook(guard)
    warnings.simplefilter("ignore")
    sys.path.append(str(Path(__file__).parent))
    import kernel_twins
    import typer
    from PIL import Image

    from loaderkit import native
    from loaderkit.cli.app import app

    for name in ("read_range", "read_hashed", "gather_ranges", "scatter_ranges", "read_many"):
        setattr(native, name, getattr(kernel_twins, name))  # C opens files without a word to the hook
    command = typer.main.get_command(app)
    typer.main.__dict__["get_command"] = lambda _: command  # else most of the time would be spent making it
    Image.init()
    ways = Ways(folder, guard)
    if "misbehave" in what:
        guard.arm()
        misbehave(guard, folder / "odd")
    else:
        good = good_files(folder / "good")
        ways.all(good)
        ways.failures.clear()
        ways.raw.clear()
        guard.arm()
        ways.all(folder / "odd", good)
    guard.is_on = False
    report.write_text(json.dumps({"seen": guard.seen, "failures": ways.failures, "raw": ways.raw}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
