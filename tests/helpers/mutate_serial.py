"""Files of lines and records, to be damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mutate import OPERATORS as PLAIN
from mutate_formats import JSON, whole_number
from tf_records import example, record

from loaderkit import Pipeline, native
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import FormatError
from loaderkit.sources.serial.lines import parse_json
from loaderkit.sources.serial.offsets import parse
from loaderkit.sources.serial.offsets_file import write_index
from loaderkit.sources.serial.records import parse_idx, scan_records
from loaderkit.sources.serial.scan import find_lines


def serial_kinds(epoch: Callable[[Any, dict[str, bytes]], None]) -> Iterator[tuple[Any, ...]]:
    """What `Kind` of mutants.py is made of; `epoch` loads a pipeline over objects in memory."""

    def reading(name: str, kind: str, others: dict[str, bytes]) -> Callable[[bytes], None]:
        url = f"memory://{min([name, *others], key=len)}"
        begun = Pipeline.lines(url) if kind == "lines" else Pipeline.tfrecord(url)
        read = begun.shuffle("none").read().batch(2).prefetch(concurrency=2)
        return lambda data: epoch(read, {**others, name: data})

    def scan(data: bytes) -> None:
        connector = MemoryConnector({"x.tfrecord": data})
        list(scan_records(connector, connector.stat("x.tfrecord")))

    lines = b'{"a": 1, "b": [1, 2.5], "c": {"d": "\xc3\xa9"}}\n\n{"a": -2, "b": [3, 4.5], "c": null}\r\n'
    one = example({"a": [b"abc"], "b": [1.5, 2.5], "c": [1, 300, -1]})
    records = record(one) + record(example({"a": [b""], "b": [0.5, 1.0], "c": [4, 5, 6]}))
    connector = MemoryConnector({"x.jsonl": lines})
    info = connector.stat("x.jsonl")
    offsets = write_index(connector, info, find_lines(connector, info))
    idx = f"0 {len(record(one))}\n{len(record(one))} {len(records) - len(record(one))}\n".encode()
    use = reading("x.jsonl", "lines", {})
    yield ("jsonl", lines, JSON, lambda data: parse_json(str(data.split(b"\n")[0], "utf-8")), (use,), ValueError)
    use = reading("x.jsonl.offsets", "lines", {"x.jsonl": lines})
    yield ("offsets", offsets, (*PLAIN, whole_number), lambda data: parse(data, info), (use,), FormatError)
    use = reading("x.tfrecord", "tfrecord", {})
    yield ("tfrecord", records, (*PLAIN, whole_number), scan, (use,), FormatError)
    yield (
        "example",
        one,
        PLAIN,
        lambda data: native.parse_example(data, None),
        (lambda data: use(record(data)),),
        ValueError,
    )
    use_idx = reading("x.tfrecord.idx", "tfrecord", {"x.tfrecord": records})
    yield ("tfrecord-idx", idx, PLAIN, lambda data: parse_idx(data, len(records)), (use_idx,), FormatError)
