"""The two reports, on a training loop and on a restore. The same records are shown in the terminal, as HTML and as JSON.

Durations are in seconds and end in `_s`, sizes are in bytes, shares of time in percent. None means that something was
not measured. `schema_version` grows when a field changes its meaning or is removed; new fields may come without that.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationError, computed_field

from loaderkit.diagnosis.restores import RestoreVerdict
from loaderkit.diagnosis.verdict import Part
from loaderkit.diagnosis.watched.lines import LineTimes
from loaderkit.profile.port.parts import PortedLoader
from loaderkit.profile.render.paragraph import paragraph
from loaderkit.profile.report_parts import (
    Comparison,
    FirstBatch,
    Headroom,
    Machine,
    NodeRow,
    ObjectRow,
    SaveRow,
    SlowItem,
    SourceRow,
    StageRow,
    StageTime,
    StallPart,
    StartPart,
    Steps,
    Utilisation,
    VerdictPart,
    WhatIf,
)

SCHEMA_VERSION = 1


class _Document(Part):
    """What both kinds of reports have: a version, their origin, and their JSON."""

    schema_version: int = SCHEMA_VERSION
    name: str = Field(description="of the pipeline")
    made_at: str = Field(description="ISO 8601, UTC")
    machine: Machine
    partial: str | None = Field(None, description="why it is not whole: interrupted, an error; null: it is")

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """The one JSON document that `from_json` reads."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The report of a JSON document. Raises ValueError if it is none, or one of another version."""
        try:
            report = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
        if report.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"a report of version {report.schema_version}, and this loaderkit reads version {SCHEMA_VERSION}: make it again"
            )
        return report


class Report(_Document):
    """The report on a training loop: why it waits, what to change, and what that brings."""

    rank: int
    world_size: int
    verdict: VerdictPart
    wall_s: float = Field(description="between the first wait for a batch and the last batch")
    num_batches: int
    num_samples: int
    num_dropped: int = Field(0, description="samples that `filter` left out of these batches; not in num_samples")
    bad_shards: list[str] = Field([], description="that are left out of the source, each with what is wrong")
    stall: StallPart
    throughput: dict[str, float] = Field(description="samples_per_s, bytes_per_s")
    steps: Steps
    stages: list[StageRow]
    sources: list[SourceRow] = Field([], description="of several sources, in their order")
    nodes: list[NodeRow] = Field(
        [], description="that workers are on, the trainer's first; empty unless there are several"
    )
    slowest: list[SlowItem] = Field(description="at most ten, the slowest first")
    first_batch: FirstBatch | None = Field(description="null: batches had come before the report began")
    utilisation: Utilisation | None
    lines: LineTimes | None = Field(None, description="which lines of a script that is watched make its batches")
    ported: PortedLoader | None = Field(None, description="a DataLoader that is watched, as a pipeline: by --compare")
    saves: list[SaveRow] = Field([], description="of checkpoints, by CheckpointManager, in this process")
    headspace: Headroom | None = Field(None, description="what texts call headroom")
    what_if: list[WhatIf] = Field([], description="the change of the verdict first, then the most promising")
    num_unsure: int = Field(0, description="changes that what_if leaves out, as their error is over half or not known")
    model_error_percent: float | None = Field(
        None, description="how far the model's throughput of the pipeline as it is lies from the measured one"
    )
    patch: str | None = Field(
        None, description="YAML to put in the place of what stands in the file; null: nothing to set"
    )
    baseline: Comparison | None = Field(None, description="against an earlier report; null: none was given")
    series: list[dict[str, Any]] = Field(
        description="how the accounts developed; as loader.series(), from the report's begin"
    )
    memory: dict[str, Any]
    host: dict[str, Any] = Field(
        description="as in loader.stats(); others_cpus: how many CPUs other programs used, null: not known; numa: why what it "
        "may use lies on different nodes, null: it does not"
    )
    tuning: dict[str, Any]
    store: dict[str, Any]
    config: dict[str, Any] = Field(
        description="the pipeline as it ran; of a watched loop its class, and the arguments of its DataLoader"
    )

    @computed_field(  # type: ignore[prop-decorator]
        description="one paragraph: what was waited for, how sure that is, what was tried, what it would cost"
    )
    @property
    def summary(self) -> str:
        rate, batch_bytes = self.throughput["samples_per_s"], int(self.memory.get("batch_bytes") or 0)
        return paragraph(self.verdict, self.stall, self.wall_s, rate, batch_bytes)


class RestoreReport(_Document):
    """The report on a restore: one pass over a checkpoint."""

    kind: Literal["restore"] = "restore"
    url: str
    format: str
    verdict: RestoreVerdict
    num_tensors: int
    num_bytes: int
    fetched_bytes: int = Field(description="more than num_bytes where gaps between tensors were read over")
    num_reads: int
    num_reread: int = Field(description="ranges whose checksum differed the first time")
    verified: bool
    threads: int
    open_s: float = Field(description="listing, and reading the description")
    wall_s: float = Field(description="from then until the last tensor")
    bytes_per_s: float
    bare_bytes_per_s: float | None = Field(
        description="of the same objects right after, by as many threads, into memory used again; null: interrupted"
    )
    percent_of_bare: float | None
    note: str = Field(description="from where both were read, if that is known")
    waited: dict[str, float] = Field(
        description="the loop's waits in s by stage, or start, memory, wakeup; the longest first"
    )
    stages: list[StageTime]
    objects: list[ObjectRow] = Field(description="those that took longest, at most 20")
    num_objects: int
    store: dict[str, Any] = Field(description="what the connector counts")


class StartReport(_Document):
    """All there is to say about one `loaderkit.start`."""

    kind: Literal["start"] = "start"
    step: int | None = Field(description="that was restored; null: there was no checkpoint")
    total_s: float = Field(description="until the first batch was there, the program's imports included")
    one_by_one_s: float = Field(description="the sum of all parts: about what they take one behind the other")
    list_s: float = Field(description="of building the loader: to open the source and list it")
    index_s: float = Field(description="of building the loader: to read or build indexes of archives")
    parts: list[StartPart] = Field(description="in the order of their begin")
