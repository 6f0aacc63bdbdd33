"""Tests whether a GPU's decoder survives decoding regions of JPEGs. nvImageCodec 0.9 fails on them on some GPUs, and on
an H100 it ends the process (its issue 55; 0.8 does not). So they are tried in another process, once for each GPU and
version.
"""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow

from loaderkit._internal.system.child_process import how_it_ended
from loaderkit._internal.system.user_cache import default_cache_dir, keep, path_in_cache
from loaderkit.stages.image.dali.graph import Graph, build_pipeline, import_dali, inputs_of
from loaderkit.stages.image.ops import Crop, ImageOp, ImageOps, Scale

logger = logging.getLogger("loaderkit")

_MOST_S = 120.0
_WHOLE, _REGIONS = "whole images", "regions"  # what the other process prints when it has decoded them
_PROGRAM = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path[:] = json.loads(sys.argv[1])
from loaderkit.stages.image.dali.trial import attempt
attempt(json.loads(sys.argv[2]))
"""
_MOST_LEVELS = 4.0  # of 255, on average: what another way to decode a crop may change


def decodes_regions(device: int) -> bool:
    """True if the CUDA device has decoded regions of JPEGs in a process of its own; else a warning says why not."""
    path = path_in_cache(default_cache_dir(), "dali-regions", _machine(device), ".txt")
    with suppress(OSError):
        reason = path.read_bytes().decode(errors="replace")
        return _accepted(device, reason)
    reason, is_certain = _tried(device)
    if is_certain:
        keep(path, lambda file: file.write(reason.encode()))
    return _accepted(device, reason)


def _accepted(device: int, reason: str) -> bool:
    if reason:
        logger.warning(
            "GPU %d decodes whole JPEGs and crops them then, which takes it longer: a trial with regions, in another process, "
            "%s. nvImageCodec 0.9 is known for this; DALI 2.2 with nvImageCodec 0.8 is not. `decode: {regions: true}` or "
            "`false` spares the trial",
            *(device, reason),
        )
    return not reason


def _machine(device: int) -> str:
    """What the outcome depends on."""
    dali = import_dali()
    versions = [dali.__version__, dali.backend.GetNvimgcodecVersion(), dali.backend.GetNvjpegVersion()]
    with suppress(OSError):
        versions.append(Path("/proc/driver/nvidia/version").read_text().partition("\n")[0])
    return json.dumps([torch.cuda.get_device_name(device), *versions])


def _tried(device: int | None) -> tuple[str, bool]:
    """What became of the trial, as the predicate of a sentence, "" if it went well; and False if regions need not be the cause,
    as where the GPU lets no second process in."""
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps([str(entry) for entry in sys.path]), json.dumps(device)]
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_MOST_S, check=False)  # noqa: S603 - ourselves
    except subprocess.TimeoutExpired as error:
        return f"took longer than {_MOST_S:.0f} s", _WHOLE in _lines(error.stdout)
    except OSError as error:
        return f"could not begin: {error}", False
    if run.returncode == 0 and _REGIONS in _lines(run.stdout):
        return "", True
    last = "".join(_lines(run.stderr)[-1:])
    return f"{how_it_ended(run.returncode)}{f' ({last})' if last else ''}", _WHOLE in _lines(run.stdout)


def _lines(output: bytes | None) -> list[str]:
    return (output or b"").decode(errors="replace").splitlines()


# ------------------------------------------------------------------------------------------------ in the other process


def attempt(device: int | None) -> None:
    """Decode whole images, and regions of them; print what has worked. Raises RuntimeError, or ends the process."""
    images, crops = _jpegs(), _crops()
    whole = _decoded(device, images, crops, regions=False)
    print(_WHOLE, flush=True)  # noqa: T201
    for _ in range(2):
        difference = np.abs(_decoded(device, images, crops, regions=True) - whole).mean()
        if not difference < _MOST_LEVELS:
            raise RuntimeError(f"regions differ from whole images by {difference:.1f} levels of 255")
    print(_REGIONS, flush=True)  # noqa: T201


_SIZES = ((375, 500), (500, 333), (768, 1024), (1200, 900))  # height, width
_NUM_IMAGES = 32
_SCALE = Scale(64, 64)


def _jpegs() -> list[NDArray[np.uint8]]:
    """Photographs' sizes and chroma, smooth and with a little noise."""
    rng = np.random.default_rng(0)
    files = []
    for height, width in _SIZES:
        levels = np.add.outer(np.linspace(0, 90, height), np.linspace(0, 90, width))[:, :, None] + (0, 30, 60)
        noisy = (levels + rng.integers(0, 9, levels.shape)).astype(np.uint8)
        buffer = io.BytesIO()
        Pillow.fromarray(noisy).save(buffer, "JPEG", quality=90)
        files.append(np.frombuffer(buffer.getvalue(), np.uint8))
    return files * (_NUM_IMAGES // len(files))


def _crops() -> list[Crop]:
    """One inside each image."""
    rng = np.random.default_rng(1)
    crops = []
    for height, width in _SIZES * (_NUM_IMAGES // len(_SIZES)):
        tall, wide = int(rng.integers(20, height)), int(rng.integers(20, width))
        crops.append(Crop(int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1)), tall, wide))
    return crops


def _decoded(
    device: int | None, images: list[NDArray[np.uint8]], crops: list[Crop], *, regions: bool
) -> NDArray[np.float64]:
    """The crops, [n, 3, 64, 64], by one DALI pipeline."""
    steps = ImageOps((Crop, Scale), lambda *_: (crops[0], _SCALE))
    pipeline = build_pipeline(import_dali(), Graph((("trial", steps),), None, len(images), device, regions=regions))
    fed: dict[str, Any] = {"encoded": images}
    columns: list[Sequence[ImageOp]] = [crops, [_SCALE] * len(images)]
    for number, column in enumerate(columns):
        fed |= {f"{name}-{number}": values for name, values in inputs_of(column).items()}
    for name, values in fed.items():
        pipeline.feed_input(name, values)
    (output,) = pipeline.run()
    return np.array((output if device is None else output.as_cpu()).as_tensor()).astype(np.float64)
