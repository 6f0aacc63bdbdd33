"""`loaderkit restore` and `loaderkit manifest`: look at a checkpoint, read it through, write its checksums."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit._internal.units import say_size
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.byte_progress import ByteProgress, byte_progress
from loaderkit.cli.terminal.options import AsJson, Debug
from loaderkit.profile.render.summary import print_summary

if TYPE_CHECKING:
    from loaderkit.checkpoint.restore.source import OpenCheckpoint
    from loaderkit.checkpoint.restore.task import Progress
    from loaderkit.checkpoint.transfer.session import TransferSession
    from loaderkit.pipeline.config.model import PipelineConfig

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="A checkpoint: a file, a directory, or either in a tar.", show_default=False),
]
Keys = Annotated[
    list[str] | None, typer.Option("--keys", metavar="GLOB", help="Only names that match; may be repeated.")
]


def restore(
    url: Url,
    *,
    device: Annotated[str, typer.Option(help="Where the tensors are made: cpu, cuda, cuda:1, auto.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point tensors to this: bfloat16, float16, ...")
    ] = None,
    keys: Keys = None,
    memory: Annotated[
        str, typer.Option(help="Bound on memory for reads; one tensor is allocated on top of it.")
    ] = "2GiB",
    concurrency: Annotated[int, typer.Option(min=0, help="Threads that read; 0: as many as suit the store.")] = 0,
    list_only: Annotated[
        bool, typer.Option("--list", help="Read no tensor: print names, types, shapes, bytes.")
    ] = False,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Demand a manifest, and compare every byte that is read with it.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Read the checkpoint at URL through, as a training job would, and say how fast that was and what it waited for."""
    from loaderkit.checkpoint.restore.source import OpenCheckpoint, parse_device

    begin_s = time.perf_counter()
    with OpenCheckpoint.open(url, None, memory, True if verify_only else "auto") as source:
        if list_only:
            _tell_list(source, keys, as_json)
            return
        from loaderkit.checkpoint.restore.selection import choose

        names, values = choose(source.contents, keys)
        source.plain_values(values)
        place = parse_device(device)
        assert place is not None
        session = source.transfer_new(names, place, dtype, concurrency=concurrency or "auto", counts_made=True)
        result = _read_through(source, session, begin_s, len(values))
    _tell_result(result, as_json)


def run_checkpoint(config: PipelineConfig, as_json: bool) -> None:
    """`loaderkit run` of a pipeline whose source is a checkpoint: read it through once."""
    from loaderkit.pipeline.tensor_loader import TensorLoader

    begin_s = time.perf_counter()
    with TensorLoader(config, {}, time.perf_counter) as loader:
        session = loader.fill()
        result = _read_through(loader.source, session, begin_s, len(loader.values))
    _tell_result({"pipeline": config.name, **result}, as_json)


def check_checkpoint(config: PipelineConfig, as_json: bool) -> None:
    """`loaderkit check` of such a pipeline: whether it is whole, and what is in it."""
    from loaderkit.pipeline.tensor_loader import TensorLoader

    with TensorLoader(config, {}, time.perf_counter) as loader:
        name, tensor = next(iter(loader), (None, None))
        checked = {
            "pipeline": config.name,
            "url": loader.source.contents.name,
            "format": loader.source.contents.format,
            "num_tensors": len(loader),
            "num_values": len(loader.values),
            "verified": bool(loader.source.checksums),
            "first_tensor": None if tensor is None else f"{name}: {str(tensor.dtype)[6:]} {list(tensor.shape)}",
        }
    if as_json:
        console.tell_json(checked)
        return
    console.tell(f"{config.name}: it works")
    for key, value in checked.items():
        if key != "pipeline":
            console.tell(f"  {key.replace('_', ' '):<14}{value}")


def _tell_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        console.tell_json(result)
    else:
        _tell(result)


def _read_through(source: OpenCheckpoint, session: TransferSession, begin_s: float, num_values: int) -> dict[str, Any]:
    """Make every tensor and drop it: what counts is that it can be read, and how fast."""
    from loaderkit.checkpoint.restore.task import progress_of

    num_tensors = 0
    total = session.plan.num_bytes

    def now() -> Progress:
        return progress_of(source.contents, session.totals, total, time.perf_counter() - begin_s)

    def shown() -> ByteProgress:
        done = now()
        return ByteProgress(done.num_bytes, done.total_bytes, done.seconds, f"slowest: {done.slowest_object}")

    with session, byte_progress(shown) as show:
        for given in session:
            num_tensors += len(given)
            del given
            show()
        stats = session.stats().to_dict()
    done = now()
    totals = session.totals
    return {
        "url": source.contents.name,
        "format": source.contents.format,
        "verified": bool(source.checksums),
        "num_tensors": num_tensors,
        "num_values": num_values,
        "num_bytes": done.num_bytes,
        "fetched_bytes": totals.fetched_bytes,
        "num_reads": totals.num_reads,
        "num_reread": totals.num_reread,
        "wall_s": done.seconds,
        "bytes_per_s": done.bytes_per_s,
        "slowest_object": done.slowest_object,
        "objects": {
            source.contents.describe(key): {"num_bytes": t.num_bytes, "num_reads": t.num_reads, "seconds": t.seconds}
            for key, t in totals.objects.items()
        },
        "stats": stats,
    }


def _tell(result: dict[str, Any]) -> None:

    more = result["fetched_bytes"] / max(result["num_bytes"], 1)
    name = f"{result['pipeline']}: " if "pipeline" in result else ""
    console.tell(
        f"{name}{result['url']}: {result['format']}, {result['num_tensors']} tensors and {result['num_values']} values, "
        f"{say_size(result['num_bytes'])} in {result['wall_s']:.2f} s, {say_size(result['bytes_per_s'])}/s"
    )
    checked = "every block compared with the manifest" if result["verified"] else "no manifest, so nothing was compared"
    console.tell(f"{result['num_reads']} reads, {more:.3f} bytes fetched for each one needed; {checked}")
    if result["slowest_object"]:
        console.tell(f"slowest object: {result['slowest_object']}")
    if result["num_tensors"]:
        console.tell()
        print_summary(console.stdout(), result["stats"])


def _tell_list(source: OpenCheckpoint, keys: list[str] | None, as_json: bool) -> None:
    from loaderkit.checkpoint.restore.selection import choose

    contents = source.contents
    names, values = choose(contents, keys)
    rows = [
        {
            "name": name,
            "dtype": str(contents.tensors[name].dtype).removeprefix("torch."),
            "shape": list(contents.tensors[name].shape),
            "num_bytes": contents.tensors[name].num_bytes,
        }
        for name in names
    ]
    total = sum(int(str(row["num_bytes"])) for row in rows)
    if as_json:
        console.tell_json(
            {"url": contents.name, "format": contents.format, "tensors": rows, "values": values, "num_bytes": total}
        )
        return
    for row in rows:
        console.tell(f"{row['name']}  {row['dtype']} {row['shape']}  {row['num_bytes']} bytes")
    for name in values:
        console.tell(f"{name}  a plain value")
    console.tell(f"{contents.format}: {len(rows)} tensors, {len(values)} values, {say_size(total)}")


def manifest(url: Url, as_json: AsJson = False, debug: Debug = False) -> None:
    """Read the checkpoint at URL once and write the checksums of its blocks beside it; restoring compares them."""
    from loaderkit.checkpoint import write_manifest

    written = write_manifest(url)
    num_bytes = sum(item["num_bytes"] for item in written["objects"].values())
    num_hashes = sum(len(item["hashes"]) for item in written["objects"].values())
    result = {"url": url, "num_objects": len(written["objects"]), "num_bytes": num_bytes, "num_hashes": num_hashes}
    if as_json:
        console.tell_json(result)
    else:
        console.tell(f"{url}: {result['num_objects']} objects, {say_size(num_bytes)}, {num_hashes} checksums written")
