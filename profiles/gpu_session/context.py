"""What a step is given: a device, folders, photographs, and a report whose figures outlive the step's process."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from profiles.gpu_session.photographs import photographs

T = TypeVar("T")
_TO_SAY_S = 3.0


class Skipped(Exception):  # noqa: N818 (no error)
    """Raised by a step that cannot run here; its text says why."""


@dataclass
class Report:
    """The figures of a step, and the bars it has to clear; on the disk after each."""

    path: Path
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None

    def add(self, **figures: Any) -> None:
        """Keep figures: numbers, with the unit in their names, and text."""
        self.figures |= {name: _short(value) for name, value in figures.items()}
        self.write()

    def bar(self, name: str, value: float, *, least: float | None = None, most: float | None = None) -> None:
        """Keep a figure, and whether it is at least, or at most, so much."""
        met = (least is None or value >= least) and (most is None or value <= most)
        limit = {key: bound for key, bound in (("least", least), ("most", most)) if bound is not None}
        self.bars.append({"name": name, "value": _short(value), **limit, "met": bool(met)})
        self.add(**{name: value})

    def write(self) -> None:
        """Whole or not at all: the process may be killed at any moment."""
        found = {key: value for key, value in asdict(self).items() if key != "path" and value is not None}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        os.replace(temporary, self.path)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Context:
    """`work` is the session's folder, `fast` one in memory if there is room; `is_tiny`: this is a rehearsal; `until_s`, of
    time.monotonic: when the step's process is ended."""

    work: Path
    fast: Path
    is_tiny: bool
    report: Report
    until_s: float = math.inf

    def left_s(self) -> float:
        """Seconds that a program which this step starts may take, so that there is time to say how it ended."""
        return max(1.0, self.until_s - time.monotonic() - _TO_SAY_S)

    @cached_property
    def device(self) -> torch.device:
        """The GPU, or the CPU where there is none."""
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        """True if there is a GPU."""
        return self.device.type == "cuda"

    def need_gpu(self) -> None:
        """Raises Skipped without a GPU."""
        if not self.on_gpu:
            raise Skipped("no CUDA device")

    def sized(self, full: T, tiny: T) -> T:
        """`tiny` in a rehearsal."""
        return tiny if self.is_tiny else full

    def photos(self) -> Path:
        """The session's photographs, in folders by class; made by the first step that asks."""
        return photographs(self.work / "photos", *self.sized((500, 4), (40, 2)))

    @contextmanager
    def folder(self, num_bytes: int) -> Iterator[Path]:
        """A folder for so many bytes, in memory if there is room for twice as many."""
        status = os.statvfs(self.fast)
        has_room = status.f_bavail * status.f_frsize > 2 * num_bytes
        place = self.fast if has_room else self.work
        self.report.add(files_in="memory" if has_room else "the work folder")
        with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as name:
            yield Path(name)

    def wait(self) -> None:
        """Until the GPU has done what this thread's current stream was given."""
        if self.on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
