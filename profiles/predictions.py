"""What the profiler says of pipelines with one bottleneck, put to the test: python -m profiles.predictions [--out FOLDER]

For each case of `profiles.bottlenecks`: is the verdict right; what the suggested change brings once it is made, where it is one
of settings; what the model predicts for every change that can be tried, and what that change brings. All in turns with the
pipeline as it is. With --out it writes predictions-<machine>-<date>.json and .md there. With --varied, only predictions, for
pipelines whose times vary.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaderkit.connectors.memory import MemoryConnector
from loaderkit.diagnosis.verdict import Setting
from loaderkit.loader import Loader
from loaderkit.pipeline.config.builder import Pipeline, to_config
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.profile.experiments.causal import check_verdict
from loaderkit.profile.experiments.interleave import Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import endless, run_steps, sleep_step
from loaderkit.profile.report import Report
from loaderkit.profile.whatif.table import verify, what_if
from loaderkit.stages.slowed import Slowdown
from profiles.bottlenecks import BATCH, CASES, DOZEN, Case, build, cpu_seconds, is_right, photographs
from profiles.record import record

_NUM_WARM, _NUM_STEPS = 10, 48
_GAIN = 1.0
_NUM_TRIES = 3
_CLEAR = 15.0  # percent: half the interval of a measured speed-up
_QUIET_CPUS = 0.3
_MOST_HALF = 0.25  # of a ratio: a wider interval says that other programs came and went
# What is injected there does not go along into another process: a delay of the memory connector, a lock, a stage's stand-in.
_STAYS_HERE = frozenset(
    {"slow store", "high latency", "one straggler in 50", "little memory", "shared lock", "slow transfer"}
)


class Unsteady(MemoryConnector):
    """Objects that take 2 ms each, and some of them longer: one in 40 takes 60 ms, or of 120 ten in a row take 15 ms each, or
    once in every 0.4 s, at random, nothing comes for 100 ms: in step with windows, one variant would have all the pauses."""

    def __init__(self, kind: str) -> None:
        super().__init__(photographs(64))
        self._kind = kind
        self._numbers = {key: number for number, key in enumerate(sorted(photographs(64)))}

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        number, now = self._numbers[key], time.perf_counter()
        if self._kind == "stragglers":
            time.sleep(0.06 if number % 40 == 7 else 2e-3)
        elif self._kind == "slow runs":
            time.sleep(0.015 if number % 120 < 10 else 2e-3)
        else:
            end = random.Random(int(now / 0.4)).uniform(0.1, 0.4)
            time.sleep(2e-3 + (max(0.0, end - now % 0.4) if end - now % 0.4 < 0.1 else 0.0))


@dataclass(frozen=True)
class Varied:
    """A pipeline whose times vary, and its loop, which takes `step_s` a batch of eight."""

    kind: str
    batches: int | str
    workers: int
    is_shuffled: bool
    step_s: float

    bottleneck = "varied"

    @property
    def name(self) -> str:
        order = "shuffled" if self.is_shuffled else "in order"
        return f"{self.kind} {order}, batches: {self.batches}, {self.workers} workers, step {1e3 * self.step_s:.0f} ms"

    def config(self, more: Mapping[str, Any]) -> PipelineConfig:
        order = Pipeline.files("memory://photographs", include="*.jpg")
        order = order.shuffle(seed=3) if self.is_shuffled else order.shuffle("none")
        pipeline = order.read().decode().center_crop(64).batch(BATCH)
        now = {"prefetch.concurrency": self.workers, "prefetch.batches": self.batches}
        return to_config(pipeline, {**now, **more})

    def build(self, more: Mapping[str, Any], slowdown: Slowdown | None = None) -> Loader:
        given = {"memory": Unsteady(self.kind)}
        plan = compile_pipeline(self.config(more), rank=0, world_size=1, connectors=given, slowdown=slowdown)
        return Loader(plan)


_DEPTHS: tuple[int | str, ...] = (1, 2, "auto")
VARIED = [
    Varied(kind, batches, workers, kind == "stragglers" and batches == 2, step_s)
    for kind in ("stragglers", "slow runs", "pauses")
    for batches in _DEPTHS
    for workers, step_s in ((2, 14e-3), (4, 10e-3))
]


def look_at_varied(case: Varied, *, seconds: float) -> dict[str, Any]:
    """The predictions for one case, and what came of them; `seconds` for each change."""
    step = sleep_step(case.step_s)
    with case.build({}) as loader:
        batches = endless(loader)
        run_steps(batches, step, seconds=6.0 if case.batches == "auto" else 1.0)
        with loader.profile() as recording:
            run_steps(batches, step, seconds=6.0)
    report = recording.result
    sizes = {"prefetch.batches": report.tuning["batches"]}  # what the tuner had come to, where there was one

    def make(overrides: Mapping[str, Any], slowdown: Slowdown | None) -> Loader:
        return case.build({**sizes, **overrides}, slowdown)

    rows, off = what_if(report, case.config(sizes))
    tried = []
    for row in rows:
        if row.can_run and not _moves(row.settings) and row.name != "executor: inline":
            before, begin_s = cpu_seconds(), time.perf_counter()
            verified = [row]
            verify(make, step, verified, seconds=seconds)
            all_s, own_s = (now - then for now, then in zip(cpu_seconds(), before, strict=True))
            others = max(0.0, all_s - own_s) / (time.perf_counter() - begin_s)
            tried.append({**verified[0].model_dump(mode="json"), "others_cpus": round(others, 2)})
    return {
        "case": case.name,
        "verdict": report.verdict.model_dump(mode="json", exclude={"check"}),
        "others_cpus": report.host.get("others_cpus"),
        "model_error_percent": off,
        "what_if": [row for row in tried if row["measured"] is not None],
    }


def is_within(row: Mapping[str, Any]) -> bool:
    """True if what was predicted and what was measured agree by their intervals."""
    measured = row["measured"]
    said, found = row["speedup"] * row["interval_percent"], measured["speedup"] * measured["interval_percent"]
    return bool(abs(row["speedup"] - measured["speedup"]) <= math.hypot(said, found) / 100)


def varied_table(found: Sequence[dict[str, Any]]) -> str:
    """The predictions as Markdown."""
    pairs = [(one, row) for one in found for row in one["what_if"]]
    lines = [
        "# What-if where times vary",
        "",
        f"On {os.cpu_count()} CPUs; made by `python -m profiles.predictions --varied`.",
        "",
    ]
    clear = [row for _, row in pairs if row["measured"]["interval_percent"] <= _CLEAR]
    for name, chosen in (
        ("all", [row for _, row in pairs]),
        (f"measured to {_CLEAR:.0f} %", clear),
        (f"measured and predicted to {_CLEAR:.0f} %", [row for row in clear if row["interval_percent"] <= _CLEAR]),
    ):
        for what, rows in ((name, chosen), (f"{name}, depth", [row for row in chosen if "ahead" in row["name"]])):
            errors = [abs(row["measured"]["error_percent"]) for row in rows]
            if len(errors) > 1:
                middle, high = statistics.median(errors), statistics.quantiles(errors, n=20)[-1]
                lines.append(
                    f"- {what}: {len(errors)} changes, error {middle:.1f} % in the median, {high:.0f} % for one in 20; "
                    f"{sum(map(is_within, rows))} within their intervals."
                )
    off = [abs(one["model_error_percent"]) for one in found]
    lines += [
        f"- The pipelines as they are: {statistics.median(off):.1f} % off in the median, {max(off):.0f} % at most.",
        "",
    ]
    lines += [
        "| pipeline | change | predicted | measured | error | CPUs of others, before and meanwhile |",
        "|---|---|---|---|---|---|",
    ]
    for one, row in pairs:
        measured = row["measured"]
        predicted = f"{row['speedup']:.2f}x +- {row['interval_percent']:.0f} %"
        speedup = f"{measured['speedup']:.2f}x +- {measured['interval_percent']:.0f} %"
        others = f"{one['others_cpus']:.1f}, {row['others_cpus']:.1f}"
        cells = (
            one["case"],
            row["name"],
            predicted,
            speedup,
            f"{measured['error_percent']:+.0f} %",
            others,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def maker(case: Case) -> Make:
    def make(overrides: Mapping[str, Any], slowdown: Slowdown | None) -> Loader:
        return build(case, overrides, slowdown)[0]

    return make


def report_of(case: Case) -> Report:
    """A profile of a case, but for its beginning: of up to three the first that other programs left alone, or else the one
    that they disturbed least, right or wrong."""
    found = []
    for _ in range(_NUM_TRIES):
        found.append(_report_of(case))
        if _others(found[-1]) < _QUIET_CPUS:
            break
    return min(found, key=_others)


def _others(report: Report) -> float:
    return float(report.host.get("others_cpus") or 0.0)


def _report_of(case: Case) -> Report:
    loader, step_s = build(case)
    factor = 4 if case.bottleneck == "little memory" else 1
    with loader:
        batches = endless(loader)
        for _ in range(_NUM_WARM * factor):
            next(batches)
        with loader.profile() as recording:
            run_steps(batches, sleep_step(step_s), num_steps=_NUM_STEPS * factor)
    return recording.result


def try_change(case: Case, report: Report, seconds: float) -> dict[str, Any] | None:
    """What the verdict's settings bring; None where it has none. Measured on while the interval is wide, up to three times
    as long."""
    settings = {setting.key: setting.value for setting in report.verdict.settings}
    if not settings:
        return None
    make, step = maker(case), sleep_step(build(case)[1])
    try:
        with ExitStack() as stack:
            old = Variant(stack.enter_context(make({}, None)), step)
            new = Variant(stack.enter_context(make(settings, None)), step)
            for _ in range(_NUM_TRIES):
                interleave([old, new], rounds=5, window_s=seconds / 20)
                ratio, half = ratio_of(new, old)
                if half < _MOST_HALF * ratio:
                    break
    except Exception as error:
        return {"settings": settings, "error": f"{type(error).__name__}: {error}"[:200]}
    return {"settings": settings, "speedup": ratio, "interval": half}


def look_at(case: Case, *, seconds: float, checks: bool, what_ifs: bool = True) -> dict[str, Any]:
    """Everything about one case; `seconds` for each change."""
    report = report_of(case)
    make, step = maker(case), sleep_step(build(case)[1])
    rows, off = what_if(report, build(case)[0].config)
    runnable = [
        row
        for row in rows
        if what_ifs and row.can_run and not (case.bottleneck in _STAYS_HERE and _moves(row.settings))
    ]
    if runnable:
        verify(make, step, runnable, seconds=seconds * len(runnable))
    check = check_verdict(make, step, report, seconds=2 * seconds) if checks else None
    return {
        "case": case.name,
        "bottleneck": case.bottleneck,
        "verdict": report.verdict.model_dump(mode="json", exclude={"check"}),
        "is_right": is_right(case, report.verdict.model_dump()),
        "model_error_percent": off,
        "change": try_change(case, report, seconds),
        "check": None if check is None else check.model_dump(mode="json"),
        "what_if": [row.model_dump(mode="json") for row in runnable if row.measured is not None],
    }


def _moves(settings: Sequence[Setting]) -> bool:
    return any(setting.value == "process" for setting in settings)


def pairs_of(found: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(one["case"], row) for one in found for row in one["what_if"]]


def table(found: Sequence[dict[str, Any]]) -> str:
    """The result as Markdown."""
    pairs = pairs_of(found)
    errors = [abs(row["measured"]["error_percent"]) for _, row in pairs]
    changes = [one for one in found if one["change"] is not None and "speedup" in one["change"]]
    num_faster = sum(one["change"]["speedup"] > _GAIN for one in changes)
    checks = [one["check"]["agrees"] for one in found if one["check"] is not None]
    lines = [
        "# Verdicts, changes and predictions put to the test",
        "",
        f"On {os.cpu_count()} CPUs; made by `python -m profiles.predictions`.",
        "",
        f"- Verdicts: {sum(one['is_right'] for one in found)} of {len(found)} right.",
        f"- Suggested changes of settings: {num_faster} of {len(changes)} raise throughput.",
        f"- Checks of the verdict: {checks.count(True)} agree, {checks.count(False)} do not, {checks.count(None)} too noisy.",
    ]
    if errors:
        lines.append(
            f"- What-if: {len(errors)} pairs of pipeline and change, error {statistics.median(errors):.1f} % in the median, "
            f"{statistics.quantiles(errors, n=10)[-1]:.0f} % for one in ten."
        )
    lines += ["", "| pipeline | change | predicted | measured | error |", "|---|---|---|---|---|"]
    for case, row in pairs:
        measured = row["speedup"] / (1 + row["measured"]["error_percent"] / 100)
        interval = row["measured"]["interval_percent"]
        lines.append(
            f"| {case} | {row['name']} | {row['speedup']:.2f}x | {measured:.2f}x +- {interval:.0f} % | "
            f"{row['measured']['error_percent']:+.0f} % |"
        )
    lines += ["", "| pipeline | verdict | its change | brings | check |", "|---|---|---|---|---|"]
    for one in found:
        change, verdict = one["change"], one["verdict"]
        said = f"{verdict['stage']}, {verdict['kind']}" + ("" if one["is_right"] else " (wrong)")
        what = "" if change is None else ", ".join(f"{key}: {value}" for key, value in change["settings"].items())
        brings = "" if change is None else f"{change['speedup']:.2f}x" if "speedup" in change else change["error"]
        check = (
            "" if one["check"] is None else {True: "agrees", False: "does not", None: "noisy"}[one["check"]["agrees"]]
        )
        lines.append(f"| {one['case']} | {said} | {what} | {brings} | {check} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="a folder to write the result to")
    parser.add_argument("--all", action="store_true", help="all eighty cases, not a dozen of them")
    parser.add_argument("--varied", action="store_true", help="pipelines whose times vary, and only what is predicted")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--seconds", type=float, help="for each change; 4, with --varied 16, as windows have to see the rare"
    )
    parser.add_argument("--no-what-if", action="store_true", help="only verdicts, and what they suggest")
    parser.add_argument("--no-checks", action="store_true", help="no causal checks")
    options = parser.parse_args()
    if options.varied:
        varied = []
        for one in VARIED:
            if options.only in one.name:
                varied.append(look_at_varied(one, seconds=options.seconds or 16.0))
                print(varied_table(varied[-1:]).partition("| pipeline")[2], flush=True)
        print(varied_table(varied))
        record(options.out, "what-if", results=varied)
        if options.out is not None:
            name = f"what-if-{os.cpu_count()}cpu-{datetime.datetime.now(datetime.UTC).date().isoformat()}.md"
            (options.out / name).write_text(varied_table(varied))
        return
    what = "changes" if options.no_what_if else "predictions"
    name = f"{what}-{os.cpu_count()}cpu-{datetime.date.today().isoformat()}"
    partial = None if options.out is None else options.out / f"{name}.json.partial"
    found = []
    for case in CASES if options.all or options.only else DOZEN:
        if options.only in case.name:
            found.append(
                look_at(
                    case, seconds=options.seconds or 4.0, what_ifs=not options.no_what_if, checks=not options.no_checks
                )
            )
            print(table(found[-1:]).partition("| pipeline")[2], flush=True)
            if partial is not None:
                partial.write_text(json.dumps(found, indent=1) + "\n")  # what there is, should it be broken off
    print(table(found))
    if partial is not None:
        partial.with_name(f"{name}.md").write_text(table(found))
        partial.rename(partial.with_name(f"{name}.json"))


if __name__ == "__main__":
    main()
