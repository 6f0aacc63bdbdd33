"""Stall reports of the shipped pipelines, as `loaderkit profile` makes them here; docs/reading-a-report.md reads some of them.

    python -m profiles.reports --images FOLDER      runs them: in FOLDER is train/, as `loaderkit demo` makes it
    python -m profiles.reports --render             only writes texts and the page's excerpts again, from the JSON

In profiles/results/reports/: NAME.json, and NAME.txt, which is what the terminal shows. The store of `imagenet-s3` is
SeaweedFS on this machine, with 20 ms more for every request; `database` and `two-tables` are no shipped pipelines, but rows
asked for one at a time; `two-nodes` runs on a Ray cluster of two nodes of this machine, between which batches pass by TCP.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from webdataset.writer import TarWriter

from loaderkit.checkpoint import write_manifest
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import Report, RestoreReport
from profiles.stores.servers import Seaweed, delay, upload

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "profiles" / "results" / "reports"
PAGE = ROOT / "docs" / "reading-a-report.md"
_EXCERPT = re.compile(r"<!-- ([\w-]+): ([^>]*?) -->\n```text\n(.*?)```\n", re.DOTALL)
_LATENCY_S = 0.02
_PER_SHARD = 250  # images
# As reports name them.
_IMAGES, _CACHE, _CHECKPOINT, _TENSORS = (
    Path("/tmp") / name for name in ("imagenet", "imagenet-cache", "step-1000", "photos.npy")
)
_NUM_TENSORS = 256
_STORE_BYTES = 300 << 20


class Run(NamedTuple):
    """A report to make. `images`: local files, or the bucket."""

    name: str
    pipeline: str
    is_remote: bool
    arguments: tuple[str, ...]


# Pipelines that are not shipped.
_OWN = {
    "database": """name: database
source: {kind: dataset, object: "profiles.reports:Table", args: {answer_s: 0.01}}
stages: [read, {batch: {size: 32}}]
prefetch: {concurrency: 2}
""",
    "two-tables": """name: two-tables
sources:
  - {name: web, kind: dataset, object: "profiles.reports:Table", args: {answer_s: 0.01}, weight: 0.3}
  - {name: code, kind: dataset, object: "profiles.reports:Table", args: {answer_s: 0.0005}, weight: 0.7}
stages: [read, {batch: {size: 32}}]
prefetch: {concurrency: 2}
""",
    "two-nodes": f"""name: two-nodes
source: {{kind: array, url: {_TENSORS}}}
stages: [read, {{batch: {{size: 16}}}}]
prefetch: {{executor: ray, processes: 2, batches: 8}}
""",
}


class Table:
    """Rows of a table, each asked of a database that answers after a while."""

    def __init__(self, answer_s: float) -> None:
        self._answer_s = answer_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, int]:
        time.sleep(self._answer_s)
        return {"row": index}


RUNS = (
    Run("imagenet-files", "imagenet-files", False, ("--step-time", "25ms", "--cold", "--what-if", "--verify")),
    Run("imagenet-files-waits-for-nothing", "imagenet-files", False, ("--step-time", "600ms", "--steps", "20")),
    Run("imagenet-tar", "imagenet-tar", False, ("--step-time", "40ms", "--cold")),
    Run("imagenet-dali", "imagenet-dali", False, ("--step-time", "40ms")),
    Run("imagenet-s3", "imagenet-s3", True, ("--step-time", "40ms")),
    Run("database", "database", False, ("--step-time", "40ms", "--what-if", "--verify")),
    Run("two-tables", "two-tables", False, ("--step-time", "40ms")),
    Run("two-nodes", "two-nodes", False, ("--step-time", "10ms", "--steps", "1500", "--what-if")),
    Run("restore", "restore", False, ("--cold",)),
    Run("database-changed", "database", False, ("--step-time", "40ms", "--baseline", "database.json")),
)


def _checkpoint() -> Path:
    """A gigabyte of tensors as bfloat16 with their checksums, in two files."""
    shutil.rmtree(_CHECKPOINT, ignore_errors=True)
    _CHECKPOINT.mkdir()
    for number in range(2):
        layers = range(8 * number, 8 * number + 8)
        tensors = {f"layers.{n}.weight": torch.rand(4096, 8192).to(torch.bfloat16) for n in layers}
        safetensors.torch.save_file(tensors, _CHECKPOINT / f"model-{number + 1:05}-of-00002.safetensors")
    write_manifest(_CHECKPOINT)
    return _CHECKPOINT


@contextmanager
def _two_nodes(folder: Path) -> Iterator[str]:
    """The address of a Ray cluster of two nodes with a CPU each; programs of this machine run on the first one."""
    from ray.cluster_utils import Cluster

    each: dict[str, Any] = {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
    system = {"worker_niceness": 0}  # as the loop's
    head = {**each, "include_dashboard": False, "temp_dir": str(folder), "_system_config": system}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**each)
        yield cluster.address
    finally:
        cluster.shutdown()


def _write_shards(images: Path) -> None:
    """The same images as WebDataset's shards in shards/, unless they are there."""
    folder = images / "shards"
    if folder.exists():
        return
    folder.mkdir()
    paths = sorted((images / "train").rglob("*.jpg"))
    labels = {name: number for number, name in enumerate(sorted({path.parent.name for path in paths}))}
    for begin in range(0, len(paths), _PER_SHARD):
        with TarWriter(str(folder / f"shard-{begin // _PER_SHARD:03}.tar")) as writer:
            for path in paths[begin : begin + _PER_SHARD]:
                label = path.parent.name
                writer.write({"__key__": f"{label}_{path.stem}", "jpg": path.read_bytes(), "cls": labels[label]})


def make(images: Path | None, names: list[str]) -> None:
    """Run them, one after the other; `images` may be None where none of them reads any."""
    FOLDER.mkdir(exist_ok=True)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if images is not None:
            _write_shards(images)
            _IMAGES.unlink(missing_ok=True)
            _IMAGES.symlink_to(images.resolve())
            stack.callback(_IMAGES.unlink)
        environment = {
            **os.environ,
            "IMAGENET": str(_IMAGES),
            "DECODE": "dali-cpu",
            "PYTHONPATH": str(ROOT),  # a pipeline names a class of this module
            "LOADERKIT_CACHE_DIR": str(work / "indexes"),
        }
        runs = [run for run in RUNS if not names or run.name in names]
        if any(run.is_remote for run in runs):
            assert images is not None
            server = Seaweed(work / "weed")
            stack.callback(server.stop)
            upload(server, images, "imagenet")
            shutil.rmtree(_CACHE, ignore_errors=True)
            stack.callback(shutil.rmtree, _CACHE, ignore_errors=True)
            environment |= {
                "AWS_ENDPOINT_URL": stack.enter_context(delay(server.port, _LATENCY_S)),
                "AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret",
                "AWS_EC2_METADATA_DISABLED": "true", "IMAGENET_CACHE": str(_CACHE),
            }  # fmt: skip
        if any(run.name == "restore" for run in runs):
            environment["CHECKPOINT"] = str(_checkpoint())
            stack.callback(shutil.rmtree, _CHECKPOINT)
        if any(run.name == "two-nodes" for run in runs):
            np.save(_TENSORS, np.random.default_rng(0).random((_NUM_TENSORS, 3, 224, 224), np.float32))
            stack.callback(_TENSORS.unlink)
            environment["RAY_ADDRESS"] = stack.enter_context(_two_nodes(work / "ray"))
        for run in runs:
            more = {"IMAGENET": "s3://imagenet"} if run.is_remote else {}
            arguments = list(run.arguments)
            if run.name == "database-changed":
                before = Report.from_json((FOLDER / "database.json").read_text())
                for setting in before.verdict.settings:
                    arguments += ["--set", f"{setting.key}={setting.value}"]
            pipeline = ROOT / "pipelines" / f"{run.pipeline}.yaml"
            if run.pipeline in _OWN:
                pipeline = work / f"{run.pipeline}.yaml"
                pipeline.write_text(_OWN[run.pipeline])
            command = [sys.executable, "-m", "loaderkit", "profile", str(pipeline)]
            print(run.name, *arguments, flush=True)
            subprocess.run(
                [*command, *arguments, "--json", f"{run.name}.json"],
                cwd=FOLDER, env={**environment, **more}, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip


def text_of(path: Path) -> str:
    """What the terminal shows of a report's JSON file, in lines of at most 80 characters."""
    text = path.read_text()
    kind = RestoreReport if json.loads(text).get("kind") == "restore" else Report
    return to_text(kind.from_json(text))


def section(text: str, title: str) -> str:
    """The part of a report's text that stands under a title, with it; "verdict" is the first one."""
    parts = text.split("\n\n")
    if title == "verdict":
        return parts[0].rstrip() + "\n"
    number = next(n for n, part in enumerate(parts) if part.startswith(title))
    return parts[number].rstrip() + "\n"


def filled(page: str) -> str:
    """The page with every excerpt as the reports say it now."""

    def fill(match: re.Match[str]) -> str:
        name, title, _ = match.groups()
        found = section((FOLDER / f"{name}.txt").read_text(), title)
        return f"<!-- {name}: {title} -->\n```text\n{found}```\n"

    return _EXCERPT.sub(fill, page)


def render() -> None:
    """Write texts and excerpts from the JSON."""
    for path in sorted(FOLDER.glob("*.json")):
        path.with_suffix(".txt").write_text(text_of(path))
    if PAGE.exists():
        PAGE.write_text(filled(PAGE.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--images", type=Path, help="not for `database`, `two-tables` and `two-nodes`")
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    if not args.render:
        make(args.images, args.names)
    render()


if __name__ == "__main__":
    main()
