"""From the start of the process to the first step, on a store of 20 ms a request: `loaderkit.start` beside one after the other.

    python -m profiles.start --rounds 5 [--files 3000] [--megabytes 200] [--latency 0.02] [--speed 100] [--link 1000]
        [--out profiles/results]

Each turn is a process of its own, from its creation to the end of its first step; contestants take turns within a round, the
order changed from round to round, and what is compared is the ratio within a round. Each request to the store sleeps
`--latency` seconds and as long as its bytes take at `--speed` MB/s, a connection, and at `--link` MB/s behind what others of
the process have asked for. `again` is `joint` with a kept listing, a cache of samples and the checkpoint in the tier `local`,
as in a second start on a node. `dataloader` is torch's DataLoader, two workers, with dcp.load, whose reads sleep alike.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("joint", "one by one", "dataloader", "again")
_BATCH = 64
_NUM_LAYERS = 50


# ------------------------------------------------------------------------------------------------------- the child


class _Link:
    """What all connections of a process share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0  # when all that was asked for before has come

    def wait_for(self, num_bytes: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(now_s, self._free_s) + num_bytes / (1e6 * float(os.environ["LINK"]))
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


_link = _Link()


def _sleep(num_bytes: int) -> None:
    time.sleep(float(os.environ["LATENCY_S"]) + num_bytes / (1e6 * float(os.environ["SPEED"])))
    _link.wait_for(num_bytes)


def _connectors(folder: Path) -> dict[str, Any]:
    """Of the data and of the checkpoints, slow alike."""
    from loaderkit.connectors.base import ConnectorTraits, ObjectInfo
    from loaderkit.connectors.file import FileConnector

    class Slow(FileConnector):
        traits = ConnectorTraits(is_remote=True)

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            for number, info in enumerate(super().list(prefix)):
                if number % 1000 == 0:  # a page
                    _sleep(0)
                yield info

        def stat(self, key: str) -> ObjectInfo:
            _sleep(0)
            return super().stat(key)

        def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
            _sleep(len(buffer))
            super().read_into(key, start, buffer, etag=etag)

    return {"data": Slow(folder / "data"), "run": Slow(folder / "run")}


def _pipeline(folder: Path, *, again: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {"listing": "1d", "cache": {"dir": str(folder / "cache")}} if again else {}
    return {
        "source": {
            "kind": "files",
            "url": "data://x",
            "include": "**/*.bin",
            "fields": {"x": "bin"},
            "label": "parent",
            **kept,
        },
        "stages": ["read", {"call": {"function": "profiles.start:to_array"}}, {"batch": {"size": _BATCH}}],
    }


def to_array(sample: dict[str, Any]) -> dict[str, Any]:
    """A file's bytes as an array."""
    import numpy as np

    return {"x": np.frombuffer(sample["x"], np.uint8).copy(), "label": sample["label"]}


def _model(megabytes: float) -> Any:
    import torch

    width = int((megabytes * 1e6 / 4 / _NUM_LAYERS) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(_NUM_LAYERS)))


def _child(name: str, folder: Path, megabytes: float) -> None:
    """Start, and make one step."""
    import torch

    torch.set_num_threads(1)
    model = _model(megabytes)
    batch = _with_dataloader(folder, model) if name == "dataloader" else _with_loaderkit(name, folder, model)
    model[0](torch.ones(1, model[0].in_features)).sum().backward()
    assert len(batch) == _BATCH
    print("stepped", flush=True)
    os._exit(0)  # what ends is not measured


def _with_loaderkit(name: str, folder: Path, model: Any) -> Any:
    import loaderkit

    again = name == "again"
    connectors, pipeline = _connectors(folder), _pipeline(folder, again=again)
    to = {"to": "run://x", "local": {"path": str(folder / "local")}} if again else {"to": "run://x"}
    checkpoints = loaderkit.CheckpointManager(to, connectors=connectors)
    state: dict[str, Any] = {"model": model}
    if name != "one by one":
        started = loaderkit.start(pipeline, checkpoints, state, connectors=connectors)
        loader, step = started.loader, started.step
    else:
        loader = state["loader"] = loaderkit.build(pipeline, connectors=connectors)
        step = checkpoints.restore(state)
    assert step == 1
    return next(iter(loader))["label"]


def _with_dataloader(folder: Path, model: Any) -> Any:
    import numpy as np
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Files(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.files = sorted((folder / "data").rglob("*.bin"))
            for _ in range(-(-len(self.files) // 1000)):
                _sleep(0)

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, index: int) -> Any:
            data = self.files[index].read_bytes()
            _sleep(len(data))
            return torch.from_numpy(np.frombuffer(data, np.uint8).copy()), 0

    class SlowReader(FileSystemReader):
        def _slice_file(self, file: Any, info: Any) -> Any:
            _sleep(info.length)
            return super()._slice_file(file, info)

    state = {"model": model.state_dict()}
    load(state, storage_reader=SlowReader(folder / "dcp"), no_dist=True)
    model.load_state_dict(state["model"])
    loader = torch.utils.data.DataLoader(Files(), _BATCH, shuffle=True, num_workers=2)
    return next(iter(loader))[0]


# ------------------------------------------------------------------------------------------------------ the parent


def _prepare(folder: Path, num_files: int, megabytes: float) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    import loaderkit

    draw = random.Random(0)
    for number in range(num_files):
        path = folder / "data" / f"class{number % 10}" / f"{number:06}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw.randbytes(10_000))
    model = _model(megabytes)
    save({"model": model.state_dict()}, checkpoint_id=folder / "dcp", no_dist=True)
    connectors = _connectors(folder)
    with (
        loaderkit.build(_pipeline(folder, again=False), connectors=connectors) as loader,
        loaderkit.CheckpointManager(
            {"to": "run://x", "local": str(folder / "local")}, connectors=connectors
        ) as checkpoints,
    ):
        next(iter(loader))
        checkpoints.save(1, {"model": model, "loader": loader})


def _first_step_s(name: str, folder: Path, megabytes: float) -> float:
    """Seconds until the first step of a new process, with the store's files out of the page cache."""
    for note in (*(folder / "run" / "x").glob(".starting-*"), *(folder / "local").glob(".starting-*")):
        note.unlink()  # a child ends at its first step, which leaves the note that its start did not go well
    for path in (*(folder / "run").rglob("*"), *(folder / "dcp").rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, "-m", "profiles.start", "--child", name, "--folder", str(folder)]
    begin_s = time.perf_counter()
    child = subprocess.Popen([*command, "--megabytes", str(megabytes)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "stepped\n", name
        return time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--speed", type=float, default=100, help="MB/s of a connection")
    parser.add_argument("--link", type=float, default=1e6, help="MB/s of all connections of a process")
    parser.add_argument("--child", choices=_NAMES)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.child is not None:
        _child(options.child, options.folder, options.megabytes)
    from profiles.record import record

    folder = Path(tempfile.mkdtemp(dir=options.folder))
    os.environ |= {"LATENCY_S": str(options.latency), "SPEED": str(options.speed), "LINK": str(options.link)}
    os.environ["LOADERKIT_CACHE_DIR"] = str(folder / "kept")
    try:
        _prepare(folder, options.files, options.megabytes)
        found: dict[str, list[float]] = {name: [] for name in _NAMES}
        for number in range(options.rounds + 1):
            for name in random.Random(number).sample(_NAMES, len(_NAMES)):
                seconds = _first_step_s(name, folder, options.megabytes)
                if number:  # the first one warms up: the imports, and what `again` keeps
                    found[name].append(seconds)
            if number:
                print(f"round {number}: " + ", ".join(f"{name} {found[name][-1]:.2f} s" for name in _NAMES), flush=True)
        medians = {name: statistics.median(times) for name, times in found.items()}
        ratios = {
            f"{one} over {other}": statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))
            for one, other in (("joint", "one by one"), ("joint", "dataloader"), ("again", "joint"))
        }
        print(medians, ratios)
        settings = {key: getattr(options, key) for key in ("files", "megabytes", "latency", "speed", "link")}
        record(options.out, "start", **settings, median_s=medians, ratios=ratios, rounds=found)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
