"""Verdicts on pipelines drawn at random:

    python -m profiles.drawn [--number 400] [--seed N] [--machine M] [--repeats N] [--suggest] [--trial]

Each has one bottleneck of some kind, built into some stage, of a strength drawn at random, with some workers, batches ahead,
executor. It runs under `loader.profile()`; of the report is asked: is the stage right, is the kind right, does it contradict
itself (`bottlenecks.contradictions`). With --suggest the settings that it suggests are tried, interleaved with the pipeline as
it is, with new loaders of both in each of five rounds: they help where the speed's ratio is above 1 by more than half its 95 %
interval, or the loop waits less by a point of the time, and harm where it is below 1 by more than that. With --trial these are
the settings that are left after the trial that `loaderkit profile` makes. The machine is quiet, busy (with another program),
busier (with two), or quota (half a CPU by cgroups; as root).
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from loaderkit.diagnosis.verdict import named_together
from loaderkit.profile.experiments import trial
from loaderkit.profile.experiments.interleave import Variant, interleave, ratio_of
from loaderkit.profile.experiments.loops import Step, endless
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import VerdictPart
from profiles.bottlenecks import contradictions, text_contradictions
from profiles.drawn_cases import VARIED, Drawn, build, configured, draw, is_begun
from profiles.record import record

_NUM_WARM, _NUM_BATCHES, _LEAST_S = 12, 40, 0.6
_MOST_CPUS, _HALF_OF_CPUS = 0.6, 0.4  # of all
_HARMLESS = 5.0  # percent of the time; above it training is not the limit
_TRIAL_S = 30.0
_ROUNDS, _WINDOW_S, _MOST_WINDOW_S = 5, 0.4, 3.0
_NUM_VARIED = 600  # samples of a window where one in 50 is slow: a dozen of those, or six bursts


# -------------------------------------------------------------------------------------------------- what they say


def profiled(case: Drawn, folder: Path) -> Report:
    """The report on a part of the run: from its beginning, or after a warm-up."""
    is_begun.clear()
    with build(case, folder) as loader:
        batches = endless(loader)
        if case.is_from_start:
            with loader.profile() as profile:
                _loop(batches, case.step)
            return profile.result
        for _ in range(max(_NUM_WARM, 2 * 100 // case.overrides["stages.batch.size"])):
            case.step(next(batches))
        with loader.profile() as profile:
            _loop(batches, case.step)
        return profile.result


def _loop(batches: Iterator[Any], step: Step) -> None:
    begin_s, number = time.perf_counter(), 0
    while number < _NUM_BATCHES or time.perf_counter() - begin_s < _LEAST_S:
        step(next(batches))
        number += 1
        if number >= 8 and time.perf_counter() - begin_s > 10 * _LEAST_S:
            return


def right(case: Drawn, report: Report) -> tuple[bool, bool]:
    """Whether the stage is right, and the kind. Where other programs have most of the CPUs, these are the limit of what
    computes, whatever it would be without them, and a loop that sleeps does not run the moment it is woken up."""
    verdict = report.verdict
    stages, kinds = {case.stage}, set(case.kinds)
    others = (report.host.get("others_cpus") or 0.0) / report.machine.cpus
    if case.bottleneck == "one batch" and others > _HALF_OF_CPUS:
        kinds.add("computing")  # one batch is enough work for the CPU that is left
    if others > _MOST_CPUS:
        if case.stage is None:
            stages.add("wakeup")
            kinds.add("wakeup")
        elif "gil" in kinds:
            kinds.add("computing")
    if case.stage is None and report.stall.percent > _HARMLESS:
        # A loop that is busy in Python waited a little all the same: for its workers, which got the GIL late, or for its turn.
        # By the rule a cause is named above 5 %, the longest wait (`contradictions` checks that); who reads it wants to know
        # that GIL or CPUs are short.
        stages.add(verdict.stage)
        kinds |= {"gil", "computing", "wakeup"}
    if case.stage is None and verdict.kind == "quota":  # which only a quota brings about
        stages.add("wakeup")
        kinds.add("quota")
    said = named(verdict)
    return any(stage in stages for stage, _ in said), any(stage in stages and kind in kinds for stage, kind in said)


def named(verdict: VerdictPart) -> set[tuple[str | None, str]]:
    """(stage, kind) of all that the headline names: causes that are close, and kinds that cannot be told apart."""
    together = {one.stage for one in named_together(verdict.causes)} if verdict.stage is not None else set()
    said = {(one.stage, one.kind) for one in verdict.causes if one.stage in together}
    of_first = {verdict.kind} if verdict.or_kind is None else {verdict.kind, verdict.or_kind}
    return said | {(verdict.stage, kind) for kind in of_first}


def judged(case: Drawn, report: Report) -> dict[str, Any]:
    verdict = report.verdict
    stage_is_right, kind_is_right = right(case, report)
    by_stage = {stage: round(seconds, 3) for stage, seconds in report.stall.by_stage.items() if seconds > 0.005}
    return {
        "case": case.name,
        "bottleneck": case.bottleneck,
        "stage": verdict.stage,
        "kind": verdict.kind,
        "or_kind": verdict.or_kind,
        "headline": verdict.headline,
        "named": sorted(f"{stage} {kind}" for stage, kind in named(verdict)),
        "stage_is_right": stage_is_right,
        "kind_is_right": kind_is_right,
        "contradictions": contradictions(report.model_dump(mode="json")) + text_contradictions(report),
        "percent": verdict.percent,
        "by_stage": by_stage,
        "others_cpus": report.host.get("others_cpus"),
        "evidence": verdict.evidence,
        "change": verdict.change,
        "settings": {one.key: one.value for one in verdict.settings},
    }


def after_trial(case: Drawn, report: Report, folder: Path) -> Report:
    """The report with what a trial of its settings found, as `loaderkit profile` writes it."""
    config, _ = configured(case, folder)
    return trial.tried(lambda more, _: build(case, folder, more), case.step, report, config, seconds=_TRIAL_S)


def tried(case: Drawn, settings: Mapping[str, Any], folder: Path, samples_per_s: float) -> dict[str, Any]:
    """What the suggested settings bring: the speed's ratio, and the waiting before and after. `samples_per_s`: as it is."""
    window_s = _WINDOW_S
    if case.bottleneck in VARIED:
        window_s = min(max(_WINDOW_S, _NUM_VARIED / samples_per_s), _MOST_WINDOW_S)
    (old, new), *others = [_pair(case, settings, folder, window_s, number) for number in range(_ROUNDS)]
    for other_old, other_new in others:
        old.windows += other_old.windows
        new.windows += other_new.windows
    ratio, half = ratio_of(new, old)
    return {
        "speedup": ratio,
        "half": half,
        "stall_before": old.stall_percent,
        "stall_after": new.stall_percent,
        "harmed": ratio + half < 1.0,
        "helped": ratio - half > 1.0 or old.stall_percent - new.stall_percent > 1.0,
    }


def _pair(
    case: Drawn, settings: Mapping[str, Any], folder: Path, window_s: float, number: int
) -> tuple[Variant, Variant]:
    """A window of a loader as it is and one of a loader with the settings, in turns the first. Loaders of one pipeline differ
    in speed."""
    with build(case, folder) as as_is, build(case, folder, settings) as changed:
        old, new = Variant(as_is, case.step), Variant(changed, case.step)
        interleave([old, new][:: 1 if number % 2 else -1], rounds=1, window_s=window_s)
        return old, new


# ---------------------------------------------------------------------------------------------------- the machine


@contextmanager
def machine(name: str) -> Iterator[None]:
    """Busy programs beside this one, or a quota around it."""
    if name == "quota":
        with quota(0.5):
            yield
        return
    programs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range({"quiet": 0, "busy": 1, "busier": 2}[name])
    ]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def quota(cpus: float) -> Iterator[None]:
    """This process may use so many CPUs (cgroups, version 1; as root)."""
    root = Path("/sys/fs/cgroup/cpu")
    folder = root / f"quota-{os.getpid()}"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000")
    (folder / "cpu.cfs_quota_us").write_text(str(int(1e5 * cpus)))
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


def repeated(cases: Iterator[Drawn], times: int) -> Iterator[Drawn]:
    """Every case so many times in a row."""
    return (case for case in cases for _ in range(times))


def unstable(rows: Sequence[Mapping[str, Any]], times: int) -> Iterator[tuple[str, collections.Counter[str]]]:
    """Of `times` runs of each pipeline, those of which under nine tenths name one stage and kind, alone or beside others."""
    for runs in (rows[begin : begin + times] for begin in range(0, len(rows), times)):
        count = collections.Counter(said for row in runs for said in row["named"])
        if max(count.values()) < 0.9 * len(runs):
            yield runs[0]["case"], count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--machine", choices=["quiet", "busy", "busier", "quota"], default="quiet")
    parser.add_argument("--only", default="", help="only pipelines whose name contains this")
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of every pipeline; all of them should say the same"
    )
    parser.add_argument("--suggest", action="store_true", help="try the settings that are suggested")
    parser.add_argument("--trial", action="store_true", help="only those that a trial has found to be faster")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, machine(options.machine):
        cases = (case for case in iter(lambda: draw(rng), None) if options.only in case.name)
        for case in islice(repeated(cases, options.repeats), options.number * options.repeats):
            report = profiled(case, Path(folder))
            row = judged(case, report)
            if options.trial and row["settings"]:
                row["settings"] = {
                    one.key: one.value for one in after_trial(case, report, Path(folder)).verdict.settings
                }
            if (options.suggest or options.trial) and row["settings"]:
                row["tried"] = tried(case, row["settings"], Path(folder), report.throughput["samples_per_s"])
            rows.append(row)
            wrong = [name for name in ("stage", "kind") if not row[f"{name}_is_right"]]
            if wrong or row["contradictions"] or "tried" in row:
                print(f"{' and '.join(wrong) or 'right'}: {row}", flush=True)
    for name, count in unstable(rows, options.repeats):
        print(f"not the same in {options.repeats} runs: {name}: {dict(count)}")
    shares = {name: sum(row[name] for row in rows) / len(rows) for name in ("stage_is_right", "kind_is_right")}
    helped = [row["tried"]["helped"] for row in rows if "tried" in row]
    if helped:
        shares["helped"] = sum(helped) / len(helped)
        harmed = sum(row["tried"]["harmed"] for row in rows if "tried" in row)
        print(f"settings were suggested for {len(helped)}, helped {sum(helped)}, and harmed {harmed}")
    wrong_kinds = collections.Counter(row["bottleneck"] for row in rows if not row["kind_is_right"])
    print(f"{len(rows)} on a {options.machine} machine: {shares}, contradictions in "
          f"{sum(bool(row['contradictions']) for row in rows)}; kinds wrong: {dict(wrong_kinds)}")  # fmt: skip
    record(options.out, f"drawn-{options.machine}", seed=options.seed, **shares, rows=rows)


if __name__ == "__main__":
    main()
