"""Eight pictures in every way that DALI's decoder can be asked for them, each way in a process of its own: some are known to
crash (nvImageCodec's issue 55: regions on the mixed device of an H100)."""

from __future__ import annotations

import importlib
import io
import itertools
import json
from typing import Any

import numpy as np
from PIL import Image

from profiles.gpu_session.context import Context
from profiles.gpu_session.dali_import import need_dali
from profiles.gpu_session.programs import run_programs

_PROGRAM = """
import sys
from profiles.gpu_session.pictures import show
show(sys.argv[1:])
"""
_HARDWARE = "0.9", "0"
_SLICE, _WHOLE = "slice", "whole"
_MOST_LEVELS = 8.0  # on average: more is another picture


def measure(context: Context) -> None:
    """How each way ended, and how far its pixels are from libjpeg-turbo's."""
    need_dali()
    paths = [str(path) for path in sorted(context.photos().rglob("*.jpg"))[:: context.sized(250, 10)][:8]]
    device = "mixed" if context.on_gpu else "cpu"
    hardware = _HARDWARE if context.on_gpu else _HARDWARE[1:]
    ways = list(itertools.product((_SLICE, _WHOLE), hardware, ("1", "0")))
    if context.is_tiny:
        ways = ways[:2]
    programs = {
        f"{how}_hardware_{load}_chroma_{chroma}": ["-c", _PROGRAM, device, how, load, chroma, *paths]
        for how, load, chroma in ways
    }
    ended = run_programs(programs, context.left_s(), at_once=context.sized(4, 2))
    bad = []
    for name, program in ended.items():
        context.report.add(**{f"{name}_rc": program.rc})
        if program.rc == 0:
            found = json.loads(program.stdout)
            context.report.add(**{f"{name}_{key}": value for key, value in found.items()})
            bad += [f"{name}: another picture"] if found["mean_levels"] > _MOST_LEVELS else []
        else:
            bad.append(f"{name}: {program.rc}: {program.stderr[-350:]}")
    assert not bad, "; ".join(bad)


def show(arguments: list[str]) -> None:
    """The program of one way: decode twice, compare, and print."""
    dali: Any = importlib.import_module("nvidia.dali")
    device, how, load, chroma, *paths = arguments
    data = [np.fromfile(path, np.uint8) for path in paths]
    wanted = [np.asarray(Image.open(io.BytesIO(one.tobytes())).convert("RGB")) for one in data]
    starts, shape = [[17 + number, 33 + number] for number in range(len(data))], [160, 200]
    settings: dict[str, Any] = {"device": device, "output_type": dali.types.RGB, "adjust_orientation": False}
    settings |= {"jpeg_fancy_upsampling": chroma == "1"}
    settings |= {"hw_decoder_load": float(load)} if device == "mixed" else {}

    def define() -> Any:
        encoded = dali.fn.external_source(name="encoded", dtype=dali.types.UINT8, ndim=1)
        if how == _WHOLE:
            return dali.fn.decoders.image(encoded, **settings)
        start = dali.fn.external_source(name="start", dtype=dali.types.INT32, ndim=1)
        return dali.fn.decoders.image_slice(encoded, start=start, shape=shape, axis_names="HW", **settings)

    pipeline = dali.pipeline_def(define)(
        batch_size=len(data), num_threads=2, device_id=None if device == "cpu" else 0, prefetch_queue_depth=1
    )
    pipeline.build()
    for _ in range(3):
        pipeline.feed_input("encoded", data)
        if how == _SLICE:
            pipeline.feed_input("start", [np.array(start, np.int32) for start in starts])
        (output,) = pipeline.run()
    found = [np.asarray((output.as_cpu() if device == "mixed" else output).at(number)) for number in range(len(data))]
    if how == _SLICE:
        wanted = [
            one[top : top + shape[0], left : left + shape[1]] for one, (top, left) in zip(wanted, starts, strict=True)
        ]
    differences = [
        np.abs(one.astype(np.float32) - other.astype(np.float32)) for one, other in zip(found, wanted, strict=True)
    ]
    means, most = [float(one.mean()) for one in differences], [float(one.max()) for one in differences]
    print(json.dumps({"mean_levels": max(means), "most_levels": max(most)}))
