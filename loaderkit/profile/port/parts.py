"""The parts of a report that show a DataLoader as a pipeline of loaderkit: plain values, as in report_parts.py."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from loaderkit.diagnosis.verdict import Part
from loaderkit.profile.report_parts import Rate


class Unported(Part):
    """Something that a DataLoader does and that no pipeline of loaderkit can do the same way."""

    part: str = Field(description="data set, transform, collate_fn, sampler, samples, or the DataLoader itself")
    what: str = Field(description="its class, or a function's name, with the module unless it is the script")
    where: str = Field(description='file and line, as in "train.py:12"; of a library its module')
    why: str = Field(description="why there is no counterpart, and what to do")

    def __str__(self) -> str:
        return f"{self.part} {self.what} ({self.where}): {self.why}"


class SampleCheck(Part):
    """The result of comparing the pipeline's samples with the samples of the script's data set."""

    num_samples: int = Field(description="that were compared")
    num_listed: int = Field(description="of files: paths and classes that were compared, all there are; else 0")
    is_random: bool = Field(description="transforms draw: pixels were not compared, but shapes, types and labels")
    most_levels: float | None = Field(
        description="the most by which a pixel differs, of 255; null: there are no pictures, or they are drawn"
    )


class PortedLoader(Part):
    """A watched DataLoader as a pipeline of loaderkit, and how fast the pipeline is with the script's own step."""

    path: str | None = Field(description="of the pipeline's YAML; null: none was written")
    pipeline: dict[str, Any] | None = Field(None, description="what is in it; null: something has no counterpart")
    unported: list[Unported] = Field([], description="all that has none; empty if there is a pipeline")
    notes: list[str] = Field([], description="what is different and leaves the samples the same")
    checked: SampleCheck | None = None
    step_s: float | None = Field(
        None, description="a step of the script, computing; it was imitated; null: there was none"
    )
    step_cpus: float | None = Field(None, description="CPUs that it used meanwhile")
    before: float | None = Field(None, description="samples/s of the script's loop, after its start")
    before_stall_percent: float | None = None
    after: Rate | None = Field(None, description="of the pipeline with that step; null: it was not run")
    after_stall_percent: float | None = None
    why_not_run: str = Field("", description="why there is no `after`; empty if there is")

    @property
    def speedup(self) -> float | None:
        """How many times as fast the loop would be."""
        return None if self.after is None or not self.before else self.after.samples_per_s / self.before
