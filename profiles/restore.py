"""Restoring a checkpoint into existing CPU tensors, beside the formats' own readers and a bare parallel read.

    python -m profiles.restore --gigabytes 5 --rounds 5 [--cold | --s3] [--tiny] [--folder /data] [--out profiles/results]

Contestants take turns within a round, the order changed from round to round; what is compared is the ratio within a round.
`--cold` drops the files from the page cache before each turn (posix_fadvise); `--tiny` restores 10,000 small tensors instead.
`--s3` reads all of it from a bucket on this machine: from SeaweedFS, or, where nginx is installed, from that, which lets
SeaweedFS list the objects and hands their bytes out several times as fast. run:ai's streamer takes part where it is installed:
pip install "runai-model-streamer[s3]".
"""

from __future__ import annotations

import argparse
import importlib
import mmap
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit.checkpoint import StreamReader, write_manifest
from loaderkit.checkpoint.transfer.layout import bytes_of
from loaderkit.connectors.config import S3Args
from loaderkit.connectors.s3 import S3Connector
from profiles.record import record
from profiles.stores.servers import Seaweed, nginx

State = dict[str, torch.Tensor]
T = TypeVar("T")
_STEP = 8 * 2**20  # of bare reads past the page cache
# They leave their bytes where no tensor lies, to show what the disk could do: no peers.
_NOT_FOR_TENSORS = ("bare O_DIRECT, dropped, 8 threads", "bare O_DIRECT, 8 threads")
warnings.filterwarnings("ignore")


def make_state(gigabytes: float, tiny: bool) -> State:
    """Tensors such as a transformer has, or 10,000 of 1 kB."""
    if tiny:
        return {f"layer.{n}.bias": torch.full((256,), float(n)) for n in range(10_000)}
    num_layers = max(1, round(gigabytes * 1e9 / (4 * (4 * 2048 * 2048 + 2 * 2048))))
    state = {}
    for layer in range(num_layers):
        for name, shape in (("qkv", (3 * 2048, 2048)), ("out", (2048, 2048)), ("norm", (2048,)), ("bias", (2048,))):
            state[f"layers.{layer}.{name}"] = torch.empty(shape).uniform_()
    return state


def write(folder: Path, state: State) -> dict[str, Path]:
    """The state in every format; the manifest beside a second copy of the safetensors file (a hard link)."""
    paths = {name: folder / name for name in ("plain", "checked", "dcp")}
    for name in ("plain", "checked"):
        paths[name].mkdir()
    safetensors.torch.save_file(state, paths["plain"] / "model.safetensors")
    os.link(paths["plain"] / "model.safetensors", paths["checked"] / "model.safetensors")
    write_manifest(paths["checked"])
    paths["pt"] = folder / "model.pt"
    torch.save(state, paths["pt"])
    save(state, checkpoint_id=paths["dcp"], no_dist=True)
    return paths


Runs = dict[str, tuple[Callable[[], None], Path | None]]
"""What fills the tensors, and the directory or file it reads, if it is one."""


def run_ai(url: str, into: State) -> Callable[[], None] | None:
    """run:ai's streamer, if it is installed."""
    try:
        streamer: Any = importlib.import_module("runai_model_streamer")
    except ImportError:
        print("run:ai's streamer is not installed and is left out")
        return None

    def run() -> None:
        with streamer.SafetensorsStreamer() as stream:
            stream.stream_file(url)
            for name, tensor in stream.get_tensors():
                into[name].copy_(tensor)

    return run


def bucket(paths: dict[str, Path], folder: Path, stack: ExitStack) -> tuple[str, str]:
    """The endpoint where the same checkpoints lie in the bucket `restore`, and what serves them."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}
    server = Seaweed(folder / "weed")
    stack.callback(server.stop)
    client = server.boto()
    client.create_bucket(Bucket="restore")
    etags = {}
    for name, source in paths.items():
        if not source.is_dir():
            continue
        (folder / "www" / "restore" / name).mkdir(parents=True)
        for path in sorted(source.iterdir()):
            key = f"{name}/{path.name}"
            client.upload_file(str(path), "restore", key)  # in parts
            etags[f"/restore/{key}"] = client.head_object(Bucket="restore", Key=key)["ETag"].strip('"')
            os.link(path, folder / "www" / "restore" / key)
    endpoint = stack.enter_context(nginx(folder / "www", folder / "nginx", server.port, etags))
    return (server.endpoint, "SeaweedFS") if endpoint is None else (endpoint, "nginx, listings by SeaweedFS")


def in_a_bucket(endpoint: str, into: State) -> Runs:
    """Who can read them there."""
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ |= {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    url = "s3://restore"

    def own_dcp() -> None:
        theirs: Any = importlib.import_module("s3torchconnector")
        reader = importlib.import_module("s3torchconnector.dcp").S3StorageReader(
            "us-east-1", f"{url}/dcp", s3client_config=theirs.S3ClientConfig(force_path_style=True)
        )
        load(dict(into), storage_reader=reader, no_dist=True)

    found: dict[str, Callable[[], None] | None] = {
        "loaderkit safetensors": lambda: _into(f"{url}/plain/model.safetensors", into),
        "loaderkit safetensors, verified": lambda: _into(f"{url}/checked/model.safetensors", into),
        "loaderkit dcp": lambda: _into(f"{url}/dcp", into),
        "dcp.load with StreamReader": lambda: load(dict(into), storage_reader=StreamReader(f"{url}/dcp"), no_dist=True),
        "run:ai streamer + copy": run_ai(f"{url}/plain/model.safetensors", into),
        "dcp.load": own_dcp,
        "bare reads, 16 threads": lambda: _bare_s3(into),
    }
    return {name: (run, None) for name, run in found.items() if run is not None}


def parts_of(into: State) -> list[tuple[int, memoryview]]:
    """The tensors' memory in parts of at most 8 MiB, and where each is to be read from, as if nothing lay between them."""
    found, start = [], 0
    for target in (bytes_of(tensor) for tensor in into.values()):
        for lo in range(0, len(target), 8 * 2**20):
            part = target[lo : lo + 8 * 2**20]
            found.append((start, part))
            start += len(part)
    return found


def _side_by_side(read: Callable[[T], None], shares: list[T]) -> None:
    """Each share by a thread of its own; what one raises is raised."""
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(read, shares))


def _bare_s3(into: State) -> None:
    """As many bytes, straight into the tensors."""
    connector = S3Connector("s3://restore", S3Args())
    work = parts_of(into)

    def read(own: list[tuple[int, memoryview]]) -> None:
        for begin, part in own:
            connector.read_into("plain/model.safetensors", begin, part)

    _side_by_side(read, [work[n::16] for n in range(16)])
    connector.close()


def contestants(paths: dict[str, Path], into: State, *, cold: bool) -> Runs:
    """All that read from local files."""
    file = paths["plain"] / "model.safetensors"

    def own_safetensors() -> None:
        with safetensors.safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                into[name].copy_(opened.get_tensor(name))

    def torch_mmap() -> None:
        for name, tensor in torch.load(paths["pt"], mmap=True, weights_only=True).items():
            into[name].copy_(tensor)

    found: Runs = {
        "loaderkit safetensors": (lambda: _into(paths["plain"], into), file),
        "loaderkit safetensors, verified": (lambda: _into(paths["checked"], into), file),
        "loaderkit torch.save": (lambda: _into(paths["pt"], into), paths["pt"]),
        "loaderkit dcp": (lambda: _into(paths["dcp"], into), paths["dcp"]),
        "dcp.load with StreamReader": (
            lambda: load(dict(into), storage_reader=StreamReader(paths["dcp"]), no_dist=True),
            paths["dcp"],
        ),
        "safetensors + copy": (own_safetensors, file),
        "torch.load(mmap) + copy": (torch_mmap, paths["pt"]),
        "dcp.load": (lambda: load(dict(into), checkpoint_id=paths["dcp"], no_dist=True), paths["dcp"]),
        "bare preadv, 2 threads": (lambda: _bare(file, into, 2), file),
        "bare preadv, 8 threads": (lambda: _bare(file, into, 8), file),
    }
    if cold:
        to = _big_pages(-(-file.stat().st_size // _STEP) * _STEP)
        to[:] = bytes(len(to))
        found["bare O_DIRECT, dropped, 8 threads"] = (lambda: _bare_direct(file, 8, None, copies=False), file)
        found["bare O_DIRECT, 8 threads"] = (lambda: _bare_direct(file, 8, to, copies=False), file)
        found["bare O_DIRECT + copy, 8 threads"] = (lambda: _bare_direct(file, 8, to, copies=True), file)
        found["bare O_DIRECT + copy, 24 threads"] = (lambda: _bare_direct(file, 24, to, 2 * 2**20, copies=True), file)
    if (theirs := run_ai(str(file), into)) is not None:
        found["run:ai streamer + copy"] = (theirs, file)
    return found


def _into(path: Path | str, into: State) -> None:
    loaderkit.restore(path, into)


def _bare(file: Path, into: State, num_threads: int) -> None:
    """As many bytes, straight into the tensors."""
    work = parts_of(into)
    fd = os.open(file, os.O_RDONLY)

    def read(own: list[tuple[int, memoryview]]) -> None:
        for start, part in own:
            os.preadv(fd, [part], start)

    _side_by_side(read, [work[n::num_threads] for n in range(num_threads)])
    os.close(fd)


def _big_pages(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _bare_direct(file: Path, num_threads: int, to: mmap.mmap | None, step: int = _STEP, *, copies: bool) -> None:
    """As many bytes past the page cache: where they stay, as the disk wants them to lie; by way of memory that each thread uses
    again, copied from there, as tensors anywhere need it; or dropped there, which nobody could use.
    """
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    starts = range(0, os.fstat(fd).st_size, step)

    def read(own: range) -> None:
        with _big_pages(step) as memory:
            for start in own:
                if to is None or copies:
                    os.preadv(fd, [memory], start)
                else:
                    with memoryview(to) as whole:
                        os.preadv(fd, [whole[start : start + step]], start)
                if to is not None and copies:
                    np.copyto(np.frombuffer(to, np.uint8, step, start), np.frombuffer(memory, np.uint8))

    _side_by_side(read, [starts[n::num_threads] for n in range(num_threads)])
    os.close(fd)


def drop(path: Path) -> None:
    """Take files out of the page cache."""
    for file in [path] if path.is_file() else path.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure(
    state: State, folder: Path, rounds: int, *, cold: bool, s3: bool, only: str
) -> tuple[dict[str, list[float]], str]:
    """Seconds of every contestant in every round, and what serves them; the first round, which warms up, is left out."""
    paths, store = write(folder, state), "files"
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with ExitStack() as stack:
        if s3:
            endpoint, store = bucket(paths, folder, stack)
            runs = in_a_bucket(endpoint, into)
        else:
            runs = contestants(paths, into, cold=cold)
        chosen = only.split(";") if only else list(runs)
        if unknown := set(chosen) - runs.keys():
            raise SystemExit(f"no such contestants: {sorted(unknown)}; there are {list(runs)}")
        runs = {name: runs[name] for name in chosen}
        return interleave(runs, state, into, rounds, cold=cold), store


def interleave(runs: Runs, state: State, into: State, rounds: int, *, cold: bool) -> dict[str, list[float]]:
    """Every contestant once a round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        order = list(runs)
        random.Random(number).shuffle(order)
        for name in order:
            run, path = runs[name]
            if cold and path is not None:
                drop(path)
            begin_s = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - begin_s)
            elif "bare" not in name:
                assert all(torch.equal(into[key], state[key]) for key in state), name
                for tensor in into.values():
                    tensor.zero_()
    return seconds


def state_parser(doc: str | None, *, gigabytes: float) -> argparse.ArgumentParser:
    """The options that saves and restores share: of the state, the rounds, and where things are written."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=gigabytes)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="10,000 tensors of 1 kB instead")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    return parser


def main() -> None:
    parser = state_parser(__doc__, gigabytes=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--only", default="", help="names of contestants with semicolons between them; default: all")
    args = parser.parse_args()
    torch.set_num_threads(2)
    state = make_state(args.gigabytes, args.tiny)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        seconds, store = measure(state, Path(folder), args.rounds, cold=args.cold, s3=args.s3, only=args.only)
    ours = ("loaderkit", "dcp.load with StreamReader")
    peers = [name for name in seconds if not name.startswith(ours) and name not in _NOT_FOR_TENSORS]
    best = [min(seconds[name][n] for name in peers) for n in range(args.rounds)] if peers else []
    rows = []
    for name, taken in sorted(seconds.items(), key=lambda item: statistics.median(item[1])):
        row: dict[str, Any] = {"name": name, "seconds": taken}
        line = f"{name:<34}{statistics.median(taken):8.3f} s{num_bytes / statistics.median(taken) / 1e9:8.2f} GB/s"
        if best:
            row["of_best_peer"] = statistics.median(b / t for b, t in zip(best, taken, strict=True))
            line += f"  x{row['of_best_peer']:.2f} of best peer"
        if "dcp.load" in seconds:
            row["of_dcp_load"] = statistics.median(b / t for b, t in zip(seconds["dcp.load"], taken, strict=True))
            line += f"  x{row['of_dcp_load']:.2f} of dcp"
        rows.append(row)
        print(line)
    what = "-".join(["restore", *(word for word in ("cold", "s3", "tiny", "only") if getattr(args, word))])
    record(args.out, what, num_bytes=num_bytes, store=store, rounds=args.rounds, rows=rows)


if __name__ == "__main__":
    main()
