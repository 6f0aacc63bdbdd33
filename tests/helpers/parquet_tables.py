"""Tables for Parquet files, drawn column by column, and what a sample of theirs should be."""

from __future__ import annotations

import io
import random
import string
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

Rng = random.Random


def numbers(kind: Any, rng: Rng, num: int) -> pa.Array:
    """Numbers of an Arrow type, extremes among them."""
    if pa.types.is_boolean(kind):
        return pa.array([rng.random() < 0.5 for _ in range(num)], kind)
    dtype = np.dtype(kind.to_pandas_dtype())
    drawn = np.frombuffer(rng.randbytes(dtype.itemsize * num), dtype)
    if dtype.kind == "f":
        drawn = np.where(np.isfinite(drawn), drawn, dtype.type(0.5))
    return pa.array(drawn, kind)


def fixed(shape: tuple[int, ...], rng: Rng, num: int) -> pa.Array:
    """Nested lists of fixed sizes."""
    items = numbers(pa.float32(), rng, num * int(np.prod(shape)))
    for length in reversed(shape):
        items = pa.FixedSizeListArray.from_arrays(items, length)
    return items


def words(rng: Rng, num: int) -> list[str]:
    few = ["".join(rng.choices(string.ascii_letters + "äß日", k=rng.randint(0, 9))) for _ in range(5)]
    return rng.choices(few, k=num)


def tensors(rng: Rng, num: int) -> pa.Array:
    values = np.frombuffer(rng.randbytes(num * 24), np.int16).reshape(num, 3, 4)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(values)


TIMES = [
    pa.timestamp("us"), pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("ns"), pa.duration("ms"), pa.date32(),
    pa.time32("ms"), pa.time64("us"),
]  # fmt: skip
NARROW_TIMES = (pa.date32(), pa.time32("ms"))


def decimals(rng: Rng, num: int) -> pa.Array:
    """Decimals of up to 15 digits, of a type that may hold more, or whole numbers of up to 64 bits."""
    if rng.random() < 0.3:
        return pa.array([Decimal(rng.randint(-(2**63), 2**63 - 1)) for _ in range(num)], pa.decimal128(38, 0))
    scale = rng.randint(1, 12)
    drawn = [Decimal(rng.randint(-(10**15) + 1, 10**15 - 1)).scaleb(-scale) for _ in range(num)]
    kinds = [
        pa.decimal64(18, scale),
        pa.decimal128(15, scale),
        pa.decimal128(38, scale + 9),
        pa.decimal256(60, scale + 9),
    ]
    return pa.array(drawn, rng.choice(kinds))


INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
COLUMNS: dict[str, Callable[[Rng, int], pa.Array]] = {
    "number": lambda rng, num: numbers(
        rng.choice([*INTEGERS, pa.float16(), pa.float32(), pa.float64(), pa.bool_()]), rng, num
    ),
    "fixed list": lambda rng, num: fixed(tuple(rng.choices([1, 2, 3], k=rng.randint(1, 3))), rng, num),
    "list": lambda rng, num: pa.array(
        [[rng.randint(-9, 9) for _ in range(rng.randint(0, 4))] for _ in range(num)],
        rng.choice([pa.list_, pa.large_list])(rng.choice([pa.int64(), pa.int16()])),
    ),
    "list of lists": lambda rng, num: pa.array(
        [[[1.5] * length] * rng.randint(0, 3) for length in rng.choices([0, 1, 3], k=num)],
        pa.list_(pa.list_(pa.float64())),
    ),
    "list of pairs": lambda rng, num: pa.array(
        [[[rng.random(), 2.0]] * rng.randint(0, 3) for _ in range(num)], pa.list_(pa.list_(pa.float32(), 2))
    ),
    "tensor": tensors,
    "text": lambda rng, num: pa.array(
        words(rng, num), rng.choice([pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
    ),
    "bytes": lambda rng, num: pa.array(
        [rng.randbytes(rng.randint(0, 30)) for _ in range(num)], rng.choice([pa.binary(), pa.large_binary()])
    ),
    "fixed bytes": lambda rng, num: pa.array([rng.randbytes(5) for _ in range(num)], pa.binary(5)),
    "file": lambda rng, num: pa.array([{"bytes": rng.randbytes(9), "path": "a/b.bin"} for _ in range(num)]),
    "time": lambda rng, num: (
        pa.array([rng.randint(-(10**6), 10**6) for _ in range(num)], pa.int32())
        .cast(pa.int32() if (kind := rng.choice(TIMES)) in NARROW_TIMES else pa.int64())
        .cast(kind)
    ),
    "list of times": lambda rng, num: pa.array(
        [[rng.randint(0, 10**6)] * rng.randint(0, 3) for _ in range(num)], pa.list_(rng.choice(TIMES[:4]))
    ),
    "decimal": decimals,
    "list of texts": lambda rng, num: pa.array(
        [rng.choices([*words(rng, 3), None], k=rng.randint(0, 4)) for _ in range(num)],
        rng.choice([pa.list_, pa.large_list])(rng.choice([pa.string(), pa.large_string()])),
    ),
    "chat": lambda rng, num: pa.array(
        [
            [{"role": rng.choice(["user", "assistant"]), "content": rng.choice([*words(rng, 3), None])}]
            * rng.randint(0, 3)
            for _ in range(num)
        ],
        pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
    ),
    "pictures": lambda rng, num: pa.array(
        [[{"bytes": rng.randbytes(5), "path": None}] * rng.randint(0, 3) for _ in range(num)],
        pa.list_(pa.struct([("bytes", pa.binary()), ("path", rng.choice([pa.string(), pa.null()]))])),
    ),
    "struct": lambda rng, num: pa.array(
        [
            {
                "box": [[rng.random(), 2.0]] * rng.randint(0, 2),
                "label": rng.choice([None, rng.randint(-9, 9)]),
                "price": Decimal(rng.randint(-999, 999)).scaleb(-2),
                "at": rng.choice([None, 5]),
                "none": None,
                "deep": {"flags": rng.choice([None, [True, None]]), "word": words(rng, 1)[0]},
            }
            for _ in range(num)
        ],
        pa.struct(
            [
                ("box", pa.list_(pa.list_(pa.float32(), 2))),
                ("label", pa.int16()),
                ("price", pa.decimal128(5, 2)),
                ("at", pa.timestamp("ms")),
                ("none", pa.null()),
                ("deep", pa.struct([("flags", pa.list_(pa.bool_())), ("word", pa.string())])),
            ]
        ),
    ),
}


def drawn_table(rng: Rng, num: int, names: list[str] | None = None) -> pa.Table:
    """A table of some kinds of columns, named after them."""
    kinds = names or rng.sample(sorted(COLUMNS), rng.randint(1, 5))
    return pa.table({kind: COLUMNS[kind](rng, num) for kind in kinds})


def written(table: pa.Table, rng: Rng, **settings: Any) -> bytes:
    """The table as a Parquet file, with drawn settings where none are given."""
    drawn = {
        "row_group_size": rng.randint(1, 12),
        "compression": rng.choice(["none", "snappy", "zstd", "gzip", "lz4"]),
        "use_dictionary": rng.random() < 0.5,
        "write_page_checksum": rng.random() < 0.5,
        "data_page_version": rng.choice(["1.0", "2.0"]),
        "data_page_size": rng.choice([20, 1 << 20]),
        "write_page_index": rng.random() < 0.5,
        "store_schema": True,
    }
    file = io.BytesIO()
    pq.write_table(table, file, **{**drawn, **settings})
    return file.getvalue()


def numbered(array: Any) -> Any:
    """The same with the numbers of times, also in lists."""
    types, kind = pa.types, array.type
    if types.is_list(kind) and types.is_temporal(kind.value_type):
        return array.cast(pa.list_(pa.int32() if kind.value_type in NARROW_TIMES else pa.int64()))
    if types.is_temporal(kind):
        return array.cast(pa.int32() if kind in NARROW_TIMES else pa.int64())
    return array


def plain(cell: Any) -> Any:
    """A cell of `to_pylist` with decimals and times as numbers, the times of milliseconds."""
    if isinstance(cell, Decimal):
        return float(cell) if cell.as_tuple().exponent else int(cell)
    if isinstance(cell, datetime):
        return (cell - datetime(1970, 1, 1)) // timedelta(milliseconds=1)
    if isinstance(cell, dict):
        return cell["bytes"] if cell.keys() == {"bytes", "path"} else {key: plain(item) for key, item in cell.items()}
    return [*map(plain, cell)] if isinstance(cell, list) else cell


def reference(data: bytes) -> dict[str, list[Any]]:
    """The cells of a file by column, as `read_table` has them."""
    table = pq.read_table(io.BytesIO(data))
    cells = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        is_extension = isinstance(column.type, pa.BaseExtensionType)
        cells[name] = [
            plain(cell)
            for chunk in column.chunks
            for cell in numbered(chunk.storage if is_extension else chunk).to_pylist()
        ]
    return cells


def same(value: Any, cell: Any) -> bool:
    """True if a value of a batch is a cell."""
    if isinstance(value, torch.Tensor):
        return _flat(value.tolist()) == _flat(cell)
    return type(value) is type(cell) and bool(value == cell)


def _flat(cell: Any) -> list[Any]:
    return [item for one in cell for item in _flat(one)] if isinstance(cell, list) else [cell]
