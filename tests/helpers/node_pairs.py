"""Two nodes in one process, each with a folder, a server and a store; and steps in their folders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import xxhash

from loaderkit.checkpoint.discovery.manifest import NAME, manifest_of
from loaderkit.checkpoint.nodes.connector import NodesConnector
from loaderkit.checkpoint.nodes.folder import NodeFolder
from loaderkit.checkpoint.nodes.server import NodeServer

_BLOCK = 2**18


class Pair:
    """`stores` are those of rank 0 on the first node, and of a rank on the second."""

    def __init__(self, folder: Path, make: Callable[[str], NodeFolder] = NodeFolder) -> None:
        self.paths = [folder / "node-0", folder / "node-1"]
        for path in self.paths:
            path.mkdir(parents=True)
        self.folders = [make(str(path)) for path in self.paths]
        self.servers = [NodeServer(one) for one in self.folders]
        self.stores = [
            NodesConnector(
                str(self.paths[here]),
                here,
                {1 - here: self.servers[1 - here].address},
                writes_all=here == 0,
                timeout_s=120.0,
            )
            for here in range(2)
        ]

    def close(self) -> None:
        for store in self.stores:
            store.close()
        for server in self.servers:
            server.close()


def write_step(paths: list[Path], number: int, size: int) -> str:
    """A step of which each node has one file of random bytes; the name of its directory."""
    name, draw = f"step-{number:010d}", random.Random(number)
    files = {f"__{node}_{number}.distcp": draw.randbytes(size + node) for node in range(len(paths))}
    files[".metadata"] = b"m" * 100
    objects = {
        file: {
            "num_bytes": len(data),
            "hashes": [xxhash.xxh3_64_hexdigest(data[lo : lo + _BLOCK]) for lo in range(0, len(data), _BLOCK)],
        }
        for file, data in files.items()
    }
    for node, path in enumerate(paths):
        (path / name).mkdir()
        for file in (f"__{node}_{number}.distcp", ".metadata"):
            (path / name / file).write_bytes(files[file])
        (path / name / NAME).write_text(json.dumps(manifest_of(objects)))
    return name
