"""The verdict on a restore: what it waited for most, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from loaderkit.diagnosis.verdict import Part, Setting

_MUCH = 0.2  # of the time of `read`
_NEAR = 80.0  # percent of a raw read: little is left to gain

Limit = Literal["store", "read", "verify", "place", "memory", "start", "loop"]


class RestoreVerdict(Part):
    """What the restore waited for most, and the one change to make."""

    limit: Limit
    evidence: str
    change: str
    settings: list[Setting] = Field([], description="the same as values to set; empty where it is nothing to be set")


def diagnose_restore(
    waited: Mapping[str, float], wall_s: float, percent_of_bare: float | None, threads: int, verify_share: float = 0.0
) -> RestoreVerdict:
    """What to change. `waited`: the loop's waits in s by cause; `percent_of_bare`: of the store's own speed, if known;
    `verify_share`: of the time of `read`, spent on checksums."""
    cause = max(waited, key=lambda name: waited[name], default="start")
    share = 100.0 * sum(waited.values()) / max(wall_s, 1e-9)
    part = 100.0 * waited.get(cause, 0.0) / max(wall_s, 1e-9)
    evidence = f"{part:.0f} % of the time the loop waited for {cause}"
    if percent_of_bare is not None:
        evidence = f"{percent_of_bare:.0f} % of the speed of a bare read; {evidence}"
    if percent_of_bare is not None and percent_of_bare >= _NEAR:
        return RestoreVerdict(limit="store", evidence=evidence, change="nothing here: a faster store, or fewer bytes")
    if share < 100 - _NEAR:
        change = "the loop takes tensors more slowly than they come: what it does with them is the limit"
        return RestoreVerdict(limit="loop", evidence=f"the loop waited {share:.0f} % of the time", change=change)
    if cause == "read" and verify_share <= _MUCH:
        more = Setting(key="prefetch.concurrency", before=threads, value=2 * threads)
        change = f"{more}, so that more requests are under way"
        return RestoreVerdict(limit="read", evidence=evidence, change=change, settings=[more])
    if cause == "read":
        evidence += f"; checksums took {100 * verify_share:.0f} % of the time of its threads"
    limit, change = _CHANGES.get(cause, _CHANGES["start"])
    return RestoreVerdict(limit=limit, evidence=evidence, change=change)


_CHANGES: Mapping[str, tuple[Limit, str]] = {
    "read": ("verify", "more CPUs; or source.verify: false, where the store keeps checksums of its own"),
    "place": (
        "place",
        "save the types that are wanted, contiguous, as safetensors: then bytes are read to where they stay",
    ),
    "memory": ("memory", "more prefetch.memory, or a loop that lets go of tensors sooner"),
    "wakeup": ("start", "tensors are small: fewer and larger ones, or loaderkit.restore(url, into=...)"),
    "start": ("start", "the checkpoint is small: to open it takes longer than to read it"),
}
"""By what the loop waited for."""
