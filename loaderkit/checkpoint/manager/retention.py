"""Which checkpoints of a run to keep: a pure function of steps, times and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loaderkit.checkpoint.manager.settings import KeepArgs


@dataclass(frozen=True)
class SavedStep:
    """A whole checkpoint: its step, when it was saved in seconds since 1970, and the metrics given with it. `is_partial`: it
    has no state of optimizers."""

    step: int
    time_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_partial: bool = False


def steps_to_keep(saved: Sequence[SavedStep], keep: KeepArgs, now_s: float) -> set[int]:
    """The steps to keep: those that any rule of `keep` names, and always the newest.

    A checkpoint without the metric of `best`, or with one that is no number, is no candidate for it. Partial ones count for no
    rule, as a restore needs another one with them: those after the newest that is not partial are kept.
    """
    partial = {item.step for item in saved if item.is_partial}
    saved = [item for item in saved if not item.is_partial]
    newest = max((item.step for item in saved), default=-1)
    kept = set(sorted(item.step for item in saved)[-keep.last :])
    if keep.every is not None:
        for item in saved:
            is_young = keep.max_age_s is None or now_s - item.time_s <= keep.max_age_s
            if item.step % keep.every == 0 and is_young:
                kept.add(item.step)
    if keep.best is not None:
        name, sign = keep.best.metric, 1 if keep.best.mode == "min" else -1
        scored = [
            (sign * item.metrics[name], -item.step)
            for item in saved
            if name in item.metrics and math.isfinite(item.metrics[name])
        ]
        kept |= {-negative for _, negative in sorted(scored)[: keep.best.num]}
    return kept | {step for step in partial if step > newest}
