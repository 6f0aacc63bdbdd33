"""What the profiler says of pipelines with one bottleneck, put to the test: python -m profiles.predictions [--out FOLDER]

For each case of `profiles.bottlenecks`: is the verdict right; what the suggested change brings once it is made, where it is one
of settings; what the model predicts for every change that can be tried, and what that change brings. All in turns with the
pipeline as it is. With --out it writes predictions-<machine>-<date>.json and .md there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loaderkit.pipeline.loader import Loader
from loaderkit.profile.experiments.causal import check_verdict
from loaderkit.profile.experiments.interleave import Make, Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import endless, run_steps, sleep_step
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Setting
from loaderkit.profile.whatif.table import verify, what_if
from loaderkit.stages.slowed import Slowdown
from profiles.bottlenecks import CASES, DOZEN, Case, build, is_right

_NUM_WARM, _NUM_STEPS = 10, 48
_GAIN = 1.0
_NUM_TRIES = 3
_QUIET_CPUS = 0.3
_MOST_HALF = 0.25  # of a ratio: a wider interval says that other programs came and went
# What is injected there does not go along into another process: a delay of the memory connector, a lock, a stage's stand-in.
_STAYS_HERE = frozenset(
    {"slow store", "high latency", "one straggler in 50", "little memory", "shared lock", "slow transfer"}
)


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
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each change")
    parser.add_argument("--no-what-if", action="store_true", help="only verdicts, and what they suggest")
    parser.add_argument("--no-checks", action="store_true", help="no causal checks")
    options = parser.parse_args()
    what = "changes" if options.no_what_if else "predictions"
    name = f"{what}-{os.cpu_count()}cpu-{datetime.date.today().isoformat()}"
    partial = None if options.out is None else options.out / f"{name}.json.partial"
    found = []
    for case in CASES if options.all or options.only else DOZEN:
        if options.only in case.name:
            found.append(
                look_at(case, seconds=options.seconds, what_ifs=not options.no_what_if, checks=not options.no_checks)
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
