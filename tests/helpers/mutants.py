"""Every parser over damaged files: a program, so that a crash, a hang or a bomb ends nothing else.

    python tests/helpers/mutants.py --seed 7 --numbers 0 1000           these mutations
    python tests/helpers/mutants.py --seed 7 --numbers 41 42 --debug    one of them, with the traceback of what it raises

Seed and number say all: the kind of file, the damage and the way to read it. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import logging
import sys
import tarfile
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mutant_guard import Guard
from mutate import OPERATORS as PLAIN
from mutate_folders import OF_TORCH, container_kinds, deepspeed_kinds
from mutate_formats import (
    JSON,
    PICKLE,
    TAR,
    ZIP,
    Operator,
    Rng,
    behind_length,
    behind_npy_length,
    damaged,
    of_member,
    pick,
    whole_number,
    zip_bomb,
)
from mutate_serial import serial_kinds

MOST_PIXELS = 2**20
SHARE_USED = 0.06


class Kind(NamedTuple):
    """A kind of file: a valid one, how it is damaged, and what reads it. `parse` is what all ways to read it go through, in
    less than a millisecond; `use` what a user calls, which a few of the files are given to."""

    name: str
    data: bytes
    operators: tuple[Operator, ...]
    parse: Callable[[bytes], object]
    use: tuple[Callable[[bytes], object], ...]
    errors: type[Exception]  # what `parse` may raise


def memory(objects: dict[str, bytes]) -> Any:
    from loaderkit.connectors.memory import MemoryConnector

    return MemoryConnector(objects)


def epoch(pipeline: Any, objects: dict[str, bytes]) -> None:
    """All batches of a pipeline whose data lie in memory."""
    import loaderkit

    with loaderkit.build(pipeline, connectors={"memory": memory(objects)}) as loader:
        for _ in loader:
            pass


# --------------------------------------------------------------------------------------------------- data sets' files


def picture(kind: str) -> bytes:
    from PIL import Image

    rng = np.random.default_rng(5)
    pixels = (np.linspace(0, 200, 48)[:, None, None] + rng.integers(0, 50, (48, 40, 3))).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **({"compression": "tiff_lzw"} if kind == "TIFF" else {}))
    return file.getvalue()


def picture_kinds() -> Iterator[Kind]:
    from loaderkit import Pipeline
    from loaderkit.samples.values import Encoded
    from loaderkit.stages.image.decode import DecodeArgs, Decoder

    decoder = Decoder(DecodeArgs(max_pixels=MOST_PIXELS))

    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF"):
        extension = kind.lower()

        def parse(data: bytes, extension: str = extension) -> None:
            decoder.begin({"image": Encoded(memoryview(data), extension)}, None, {})

        def use(data: bytes, extension: str = extension) -> None:
            files = {f"a.{extension}": data, f"b.{extension}": picture(extension.upper())}
            read = Pipeline.files("memory://").shuffle("none").read().decode(max_pixels=MOST_PIXELS)
            epoch(read.random_resized_crop(size=16).batch(2).prefetch(concurrency=2), files)

        yield Kind(extension, picture(kind), (*PLAIN, whole_number), parse, (use,), ValueError)


def media_kinds() -> Iterator[Kind]:
    from media_files import sound, video

    from loaderkit import Pipeline
    from loaderkit.errors import FormatError
    from loaderkit.stages.media.audio import AudioArgs, read_sound
    from loaderkit.stages.media.video import VideoArgs, read_clip

    clip, window = VideoArgs(frames=3, stride=2, max_pixels=MOST_PIXELS), AudioArgs(rate=8000, seconds=0.2)
    settings: dict[str, Any] = {"video": clip.model_dump(), "audio": window.model_dump()}

    def as_file(name: str) -> Callable[[bytes], None]:
        read = Pipeline.files("memory://").shuffle("none").read().decode(**settings).batch(1).prefetch(concurrency=2)
        return lambda data: epoch(read, {name: data})

    def as_clip(data: bytes) -> Any:
        return read_clip(memoryview(data), clip, 0.7)

    def as_sound(data: bytes) -> Any:
        return read_sound(memoryview(data), window, 0.7)

    files = {kind: video(kind, num=12, size=(32, 48)) for kind in ("mp4", "mov", "mkv", "webm", "avi", "gif")}
    for kind, data in files.items():
        use = (as_file(f"x.{kind}"),)
        yield Kind(f"clip-{kind}", data, (*PLAIN, whole_number), as_clip, use, FormatError)
    for kind in ("wav", "flac", "mp3", "ogg", "opus", "m4a"):
        use = (as_file(f"x.{kind}"),)
        yield Kind(f"sound-{kind}", sound(kind, seconds=0.8), (*PLAIN, whole_number), as_sound, use, FormatError)


def array_kinds() -> Iterator[Kind]:
    from loaderkit import Pipeline
    from loaderkit.errors import FormatError
    from loaderkit.sources.formats.npy import view_npy
    from loaderkit.sources.formats.npz import view_npz

    numbers = np.arange(60, dtype=np.float32).reshape(10, 6)
    npy, npz, packed = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, numbers)
    np.savez(npz, a=numbers, b=np.arange(3))
    np.savez_compressed(packed, a=numbers, b=np.zeros((50, 50)))

    def as_file(name: str) -> Callable[[bytes], None]:
        read = Pipeline.files("memory://").shuffle("none").read().decode().batch(1).prefetch(concurrency=2)
        return lambda data: epoch(read, {name: data})

    def as_records(data: bytes) -> None:
        for window in (None, 3):
            read = Pipeline.array("memory://x.npy", window=window).shuffle("none").read().batch(4)
            epoch(read.prefetch(concurrency=2), {"x.npy": data})

    def every_array(data: bytes) -> None:
        for array in view_npz(memoryview(data)).values():
            array.copy()

    of_npy = (*PLAIN, whole_number, behind_npy_length, behind_npy_length, behind_npy_length)
    yield Kind(
        "npy",
        npy.getvalue(),
        of_npy,
        lambda data: view_npy(memoryview(data)).copy(),
        (as_file("x.npy"), as_records),
        FormatError,
    )
    of_npz = (*ZIP, of_member(".npy", of_npy), of_member(".npy", of_npy), zip_bomb)
    for name, file in (("npz", npz), ("npz-packed", packed)):
        yield Kind(name, file.getvalue(), of_npz, every_array, (as_file("x.npz"),), FormatError)


def tar_of(format: int = tarfile.USTAR_FORMAT, long: bool = False) -> bytes:  # noqa: A002 - as tarfile calls it
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for number in range(4):
            for extension, data in (("txt", b"abc" * number), ("cls", b"1")):
                member = tarfile.TarInfo(f"{'long/' * 40 if long and number == 2 else ''}{number}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def tar_kinds() -> Iterator[Kind]:
    from loaderkit import Pipeline
    from loaderkit.cli import main
    from loaderkit.errors import FormatError
    from loaderkit.sources.formats.tar_index import load_index, scan_tar, write_wds_index

    def scan(data: bytes) -> None:
        connector = memory({"s.tar": data})
        scan_tar(connector, connector.stat("s.tar")).names()

    def read(data: bytes) -> None:
        pipeline = Pipeline.tar("memory://s.tar").shuffle("none").read().decode().batch(2).prefetch(concurrency=2)
        epoch(pipeline, {"s.tar": data})

    def index(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            path = Path(folder, "s.tar")
            path.write_bytes(data)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                codes = [main(["index", str(path)]), main(["index", "--check", str(path)])]
            if not {*codes} <= {0, 1} or "--debug" in said.getvalue():
                raise AssertionError(f"exit codes {codes}: {said.getvalue()}")

    variants = {
        "tar": tar_of(),
        "tar-gnu": tar_of(tarfile.GNU_FORMAT, True),
        "tar-pax": tar_of(tarfile.PAX_FORMAT, True),
    }
    for name, data in variants.items():
        yield Kind(name, data, TAR, scan, (read, index), FormatError)

    connector = memory({"s.tar": variants["tar"]})
    text = write_wds_index(scan_tar(connector, connector.stat("s.tar"))).encode()

    def beside(data: bytes) -> None:
        connector = memory({"s.tar": variants["tar"], "s.idx": data})
        load_index(connector, connector.stat("s.tar"), None).names()

    def read_beside(data: bytes) -> None:
        pipeline = Pipeline.tar("memory://s.tar").shuffle("none").read().decode().batch(2).prefetch(concurrency=2)
        epoch(pipeline, {"s.tar": variants["tar"], "s.idx": data})

    from mutate_formats import number_in_text

    yield Kind("idx", text, (*PLAIN, number_in_text, number_in_text), beside, (read_beside,), FormatError)


def state_kinds() -> Iterator[Kind]:
    import loaderkit
    from loaderkit import Pipeline
    from loaderkit.errors import StateError

    pipeline = Pipeline.array("memory://x.npy").shuffle("global").read().batch(4).prefetch(executor="inline").epochs(1)
    file = io.BytesIO()
    np.save(file, np.arange(32.0))
    connectors = {"memory": memory({"x.npy": file.getvalue()})}
    loader = loaderkit.build(pipeline, connectors=connectors)
    next(iter(loader))

    def load(data: bytes) -> None:
        try:
            state = json.loads(data)
        except (ValueError, RecursionError):
            return
        loader.load_state_dict(state)

    def go_on(data: bytes) -> None:
        load(data)
        next(iter(loader), None)

    yield Kind("state", json.dumps(loader.state_dict()).encode(), JSON, load, (go_on,), StateError)


# -------------------------------------------------------------------------------------------------------- checkpoints


def a_state() -> dict[str, Any]:
    import torch

    tensor = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {"w": tensor, "t": tensor.T, "b": torch.ones(2, dtype=torch.bfloat16), "e": torch.empty(0, 3)},
        "steps": [1, {"lr": 0.1, "betas": (0.9, 0.99)}], "rng": np.arange(4), "name": "run \u00e9", "big": 2**70, "none": None,
    }  # fmt: skip


def filled(objects: dict[str, bytes], name: str) -> None:
    """A tensor of the caller's is filled, or not touched at all."""
    import torch

    import loaderkit

    given = {"model": {"w": torch.full((3, 4), 7.0)}}
    loaderkit.restore(f"memory://{name}", given, strict=False, connectors={"memory": memory(objects)})


def through_torch(objects: dict[str, bytes], name: str) -> None:
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from loaderkit.checkpoint import StreamReader

    given = {"model.w": torch.zeros(3, 4)}
    reader = StreamReader(f"memory://{name}", connectors={"memory": memory(objects)})
    try:
        load(given, storage_reader=reader, no_dist=True)
    except (CheckpointException, RuntimeError, KeyError, ValueError) as error:
        _raise_ours(error)
    finally:
        reader.reset()


def _raise_ours(error: BaseException) -> None:
    """torch gathers what ranks raise, and complains of names that a checkpoint lacks in its own way."""
    from loaderkit.errors import LoaderkitError

    if isinstance(error, LoaderkitError):
        raise error
    for failure, _ in getattr(error, "failures", {}).values():
        if "loaderkit" in "".join(traceback.format_tb(failure.__traceback__)):
            raise failure


def checkpoint_uses(
    objects: Callable[[bytes], dict[str, bytes]], name: str = "c"
) -> tuple[Callable[[bytes], object], ...]:
    """What reads a checkpoint `name` that consists of `objects(data)`."""
    import loaderkit
    from loaderkit.checkpoint import latest

    def restore(data: bytes) -> None:
        loaderkit.restore(f"memory://{name}", nested=True, connectors={"memory": memory(objects(data))})

    def newest(data: bytes) -> None:
        found = {f"runs/step-2/{key.rpartition('/')[2]}": value for key, value in objects(data).items()}
        latest("memory://runs", connectors={"memory": memory(found)})

    return (
        restore,
        lambda data: filled(objects(data), name),
        newest,
        lambda data: through_torch(objects(data), name),
    )


def checkpoint_kinds() -> Iterator[Kind]:
    import safetensors.torch
    import torch

    from loaderkit.checkpoint.formats import safetensors as of_safetensors
    from loaderkit.checkpoint.formats import torch_zip
    from loaderkit.errors import FormatError, LoaderkitError

    flat = {"model.w": torch.arange(12.0).reshape(3, 4), "model.b": torch.ones(2, dtype=torch.bfloat16)}
    data = safetensors.torch.save(flat, {"format": "pt"})
    of_header = (behind_length(JSON), behind_length(JSON), behind_length(JSON), whole_number, *PLAIN)

    def header(data: bytes) -> None:
        of_safetensors.read_header(reader_of(data), len(data))

    uses = checkpoint_uses(lambda data: {"c/x.safetensors": data})
    yield Kind("safetensors", data, of_header, header, uses, FormatError)

    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(flat, "x.safetensors")}).encode()
    whole = data
    uses = checkpoint_uses(lambda data: {"c/x.safetensors": whole, "c/model.safetensors.index.json": data})
    yield Kind("index", index, JSON, uses[0], uses[1:], LoaderkitError)

    file = io.BytesIO()
    torch.save(a_state(), file)

    def archive(data: bytes) -> None:
        torch_zip.read_archive(reader_of(data), len(data))

    uses = checkpoint_uses(lambda data: {"c/x.pt": data})
    yield Kind("torch", file.getvalue(), OF_TORCH, archive, uses, FormatError)
    yield Kind("torch-restored", file.getvalue(), (of_member("data.pkl", PICKLE),), uses[0], uses[1:], LoaderkitError)
    yield manifest_kind(whole)
    yield from dcp_kinds()


def manifest_kind(whole: bytes) -> Kind:
    from loaderkit.checkpoint import write_manifest
    from loaderkit.checkpoint.discovery.manifest import NAME
    from loaderkit.errors import LoaderkitError

    connector = memory({"c/x.safetensors": whole})
    text = json.dumps(write_manifest("memory://c", connectors={"memory": connector})).encode()
    uses = checkpoint_uses(lambda data: {"c/x.safetensors": whole, f"c/{NAME}": data})
    return Kind("manifest", text, JSON, uses[0], uses[1:], LoaderkitError)


def dcp_kinds() -> Iterator[Kind]:
    from torch.distributed.checkpoint.state_dict_saver import save

    from loaderkit.checkpoint.formats import dcp
    from loaderkit.errors import FormatError, LoaderkitError

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(a_state(), checkpoint_id=folder, no_dist=True)
        files = {f"c/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}

    uses = checkpoint_uses(lambda data: {**files, "c/.metadata": data})
    yield Kind("dcp", files["c/.metadata"], PICKLE, dcp.read_metadata, uses, FormatError)
    (name,) = (name for name in files if name.endswith(".distcp"))
    uses = checkpoint_uses(lambda data: {**files, name: data})
    yield Kind("distcp", files[name], (*PLAIN, whole_number), uses[0], uses[1:], LoaderkitError)


def reader_of(data: bytes) -> Callable[[int, memoryview], None]:
    def read(start: int, buffer: memoryview) -> None:
        assert 0 <= start <= start + len(buffer) <= len(data), f"bytes {start} to {start + len(buffer)} of {len(data)}"
        buffer[:] = data[start : start + len(buffer)]

    return read


def kinds(only: str | None) -> list[Kind]:
    made = [*picture_kinds(), *media_kinds(), *array_kinds(), *tar_kinds(), *state_kinds(), *checkpoint_kinds()]
    made += [Kind(*kind) for kind in (*serial_kinds(epoch), *container_kinds(), *deepspeed_kinds())]
    for kind in made:
        for read in (kind.parse, *kind.use):
            read(kind.data)  # as it is, it can be read; and what is imported late is imported now
    return [kind for kind in made if only in (None, kind.name)]


def mutation(
    found: list[Kind], seed: int, number: int
) -> tuple[Kind, bytes, Callable[[bytes], object], type[Exception]]:
    from loaderkit.errors import LoaderkitError

    rng: Rng = np.random.default_rng([seed, number])
    kind = found[number % len(found)]
    data = damaged(kind.data, kind.operators, rng)
    if rng.random() < SHARE_USED:
        return kind, data, pick(rng, kind.use), LoaderkitError
    return kind, data, kind.parse, kind.errors


def run(options: argparse.Namespace) -> dict[str, Any]:
    found, guard = kinds(options.only), Guard()
    outcomes: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    at = Path(options.at) if options.at else None
    for number in range(*options.numbers):
        if at:
            at.write_text(f"{number} {found[number % len(found)].name}")  # if this is the end, it says whose
        kind, data, read, errors = mutation(found, options.seed, number)
        guard.begin()
        raised: BaseException | None = None
        try:
            read(data)
            outcome = "read"
        except errors as error:
            outcome, raised = "refused", error
        except BaseException as error:
            outcome, raised = "raw", error
        outcomes[f"{kind.name} {outcome}"] += 1
        if raised is not None and (outcome == "raw" or options.debug):
            failures.append(failure(number, kind, "".join(traceback.format_exception(raised))))
        raised = None
        failures += (failure(number, kind, what) for what in guard.end(len(data)))
        if len(failures) >= 200:
            break
    faulthandler.cancel_dump_traceback_later()
    return {"outcomes": outcomes, "failures": failures}


def failure(number: int, kind: Kind, what: str) -> dict[str, Any]:
    return {"number": number, "kind": kind.name, "what": what}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--numbers", type=int, nargs=2, required=True)
    parser.add_argument("--only", help="one kind of file; its numbers are others than among all")
    parser.add_argument("--at", help="a file that says which mutation it is at")
    parser.add_argument("--debug", action="store_true")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", RuntimeWarning)  # NumPy's, of numbers that overflow
    json.dump(run(options), sys.stdout)


if __name__ == "__main__":
    main()
