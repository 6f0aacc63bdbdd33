"""Folders as Hugging Face's datasets write them, written without that package: by `save_to_disk`, and in its cache."""

from __future__ import annotations

import io
import json
import random
from itertools import pairwise
from typing import Any

import pyarrow as pa


def stream(table: pa.Table, sizes: list[int], **options: Any) -> bytes:
    """A table as a stream of record batches of these sizes."""
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        first = 0
        for size in sizes:
            writer.write_table(table.slice(first, size))
            first += size
    return file.getvalue()


def drawn_sizes(rng: random.Random, num: int) -> list[int]:
    """Some sizes whose sum is `num`."""
    cuts = sorted({0, num, *(rng.randint(0, num) for _ in range(rng.randint(0, 4)))})
    return [end - begin for begin, end in pairwise(cuts)]


def saved(
    table: pa.Table,
    rng: random.Random,
    num_files: int = 2,
    indices: list[int] | None = None,
    batch_rows: int | None = None,
) -> dict[str, bytes]:
    """The files of `save_to_disk`, in record batches of drawn sizes, or of `batch_rows`; `indices` as early versions kept
    them."""
    sizes = [len(table) // num_files] * (num_files - 1)
    sizes.append(len(table) - sum(sizes))
    files: dict[str, bytes] = {}
    first = 0
    for number, size in enumerate(sizes):
        part = table.slice(first, size)
        batches = drawn_sizes(rng, size) if batch_rows is None else [batch_rows] * (size // batch_rows)
        files[f"data-{number:05}-of-{num_files:05}.arrow"] = stream(part, batches)
        first += size
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        "_split": "train",
        "_format_columns": None,
    }
    if indices is not None:
        mapping = pa.table({"indices": pa.array(indices, pa.uint64())})
        files["indices.arrow"] = stream(mapping, drawn_sizes(rng, len(indices)))
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    features = {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    files["state.json"] = json.dumps(state).encode()
    files["dataset_info.json"] = json.dumps({"features": features}).encode()
    return files


def cached(table: pa.Table, rng: random.Random, name: str = "imdb", split: str = "train") -> dict[str, bytes]:
    """The files of one prepared configuration in the cache, one split."""
    info = {
        "config_name": "plain_text",
        "dataset_name": name,
        "features": {},
        "splits": {split: {"name": split, "num_examples": len(table), "dataset_name": name}},
    }
    return {
        "dataset_info.json": json.dumps(info).encode(),
        f"{name}-{split}.arrow": stream(table, drawn_sizes(rng, len(table))),
        "cache-0123456789abcdef.arrow": b"of `map`, and none of the data set's own",
    }
