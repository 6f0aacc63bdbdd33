"""The last step of an array: the parts that shards have made become one `.npy`, which `kind: array` reads."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from loaderkit.connectors.base import Connector
from loaderkit.shards.job import ShardJob, ShardRecord, write_parts
from loaderkit.shards.layout import SampleLayout


def join_parts(connector: Connector, job: ShardJob, key: str, records: Sequence[ShardRecord]) -> int:
    """Write the array of all records' samples; returns its bytes. Raises ConnectorError, and LoaderkitError if another run
    has begun."""
    there = [record for record in records if record.num_samples]
    header = _header(job.layout, sum(record.num_samples for record in there))
    starts = list(accumulate((record.num_bytes for record in there), initial=len(header)))
    size = starts.pop()

    def part_at(start: int, length: int) -> memoryview:
        part = np.empty(length, np.uint8).data
        num_filled = 0
        if start < len(header):
            num_filled = min(length, len(header) - start)
            part[:num_filled] = header[start : start + num_filled]
        while num_filled < length:
            number = bisect_right(starts, start + num_filled) - 1
            within = start + num_filled - starts[number]
            num = min(length - num_filled, there[number].num_bytes - within)
            connector.read_into(there[number].name, within, part[num_filled : num_filled + num])
            num_filled += num
        return part

    write_parts(connector, job, key, size, part_at)
    return size


def _header(layout: SampleLayout, num_samples: int) -> bytes:
    file = io.BytesIO()
    described = {"descr": layout.dtype, "fortran_order": False, "shape": (num_samples, *layout.shape)}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()
