"""How near the advice on the interval between saves comes to the best one, in a simulated job; and a save's predicted time.

    python -m profiles.goodput --json profiles/results/goodput-2026-11-29.json
    python -m profiles.goodput --saves          # on this machine: five sizes, each predicted by what the others took

A job is simulated second by second in its events, not by the formula that is tried: it trains, stops for the pause of a save,
begins no save before the last one is committed, uploads the newest one that is committed as soon as the last upload is over,
and is interrupted at times drawn from an exponential distribution. Then it takes what is committed, in `local`, or, as often as
machines are lost, in `to`, and does again what came after. The same interruptions come at every interval. What is lost is all
time but that of the work that was kept; of the intervals tried the best is where polynomials through their losses are lowest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaderkit.checkpoint.timing.interval import Interruptions

Floats = NDArray[np.float64]
NUM_INTERVALS, WIDEST, MIN_FITTED = 33, 3.0, 8
NUM_INTERRUPTIONS = 20_000


def drawn(rng: np.random.Generator) -> Interruptions:
    """A setting: pauses of 50 ms to a minute, an interruption in half an hour to ten days, with and without `local`; an upload
    takes at most a sixth of the time between two interruptions."""

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    pause_s = log_uniform(0.05, 60.0)
    flush_s = pause_s * log_uniform(1.0, 30.0)
    has_local = bool(rng.random() < 0.5)
    upload_s = flush_s * log_uniform(1.0, 30.0)
    return Interruptions(
        pause_s=pause_s,
        flush_s=flush_s,
        mtbf_s=max(log_uniform(1800.0, 864000.0), 20 * pause_s, 6 * upload_s if has_local else 0.0),
        upload_s=upload_s if has_local else None,
        restart_s=log_uniform(10.0, 600.0),
        lost_machines=float(rng.uniform(0.05, 0.6)) if has_local else 0.0,
    )


def lives_of(case: Interruptions, total: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """How long the job ran before each interruption, and whether the machine was lost (1 or 0). Drawn from the exponential
    distribution stratum by stratum, so that few differ in the mean by chance."""
    num_lost = round(total * case.lost_machines)
    parts = [-case.mtbf_s * np.log1p(-(np.arange(num) + rng.random(num)) / num) for num in (num_lost, total - num_lost)]
    lost = np.repeat([1.0, 0.0], [num_lost, total - num_lost])
    order = rng.permutation(total)
    return np.concatenate(parts)[order], lost[order]


def lost_shares(cases: list[Interruptions], intervals: Floats, total: int, rng: np.random.Generator) -> Floats:
    """The share of time lost in each case at each of its intervals, over `total` interruptions; [cases, intervals]."""

    def column(name: str) -> Floats:
        return np.array([[getattr(case, name) or 0.0] for case in cases])

    pause, flush, restart = column("pause_s"), column("flush_s"), column("restart_s")
    has_local = np.array([[case.upload_s is not None] for case in cases])
    upload = column("upload_s")
    drawn_lives = [lives_of(case, total, rng) for case in cases]
    lives = np.array([one for one, _ in drawn_lives])[..., None]
    lost = np.array([one for _, one in drawn_lives])[..., None] > 0
    period = np.maximum(intervals + pause, flush)
    work = period - pause  # between two saves, the second of which waits for the first
    every = np.maximum(upload, period)  # from the beginning of one upload to that of the next
    first = period - pause + flush  # when the first save is committed; save k is at k * period - pause
    worth = np.zeros_like(intervals)  # work that is kept, in seconds of training
    behind = np.zeros_like(intervals)  # work that `local` has and `to` has not
    for number in range(total):
        trained = np.maximum(lives[:, number] - restart, 0.0)
        near = np.maximum(np.floor((trained + pause - flush) / period), 0.0) * work
        begins = np.where(behind > 0, np.maximum(upload, first), first)  # after what the last life has left
        num = np.maximum(np.floor((trained - begins - upload) / every) + 1, 0.0)  # uploads that are over
        newest = np.floor((begins + (num - 1) * every + pause - flush) / period + 1e-9) * work
        left = np.where(trained < upload, -behind, 0.0)
        far = np.where(has_local, np.where(num > 0, newest, left), near)
        is_lost = lost[:, number]
        worth += np.where(is_lost, far, near)
        behind = np.where(is_lost, 0.0, near - far)
    share: NDArray[np.float64] = 1.0 - worth / lives.sum(axis=1)
    return share


class Curve:
    """What is lost by interval: a polynomial in its logarithm on each side of where uploads become faster than saves."""

    def __init__(self, intervals: Floats, lost: Floats, border_s: float) -> None:
        self._border_s, self._parts = border_s, []
        for chosen in (intervals < border_s, intervals >= border_s):
            if chosen.sum() >= MIN_FITTED:
                x = np.log(intervals[chosen])
                self._parts.append((x[0], x[-1], np.polynomial.Polynomial.fit(x, lost[chosen], 4)))

    def at(self, interval_s: float) -> float:
        """What is lost at an interval."""
        x = np.log(interval_s)
        _, _, nearest = min(self._parts, key=lambda part: max(part[0] - x, x - part[1], 0.0))
        return float(nearest(x))

    def best_s(self) -> float:
        """The interval at which the least is lost."""
        fine = np.concatenate([np.linspace(low, high, 2001) for low, high, _ in self._parts])
        values = np.concatenate([part(np.linspace(low, high, 2001)) for low, high, part in self._parts])
        return float(np.exp(fine[np.argmin(values)]))


def simulate(num: int, seed: int, num_interruptions: int = NUM_INTERRUPTIONS) -> dict[str, Any]:
    """The advice and the best of `num` drawn settings."""
    rng = np.random.default_rng(seed)
    cases = [drawn(rng) for _ in range(num)]
    advised = [case.best_interval_s() for case in cases]
    lows = [max(one / WIDEST, case.least_interval_s) for one, case in zip(advised, cases, strict=True)]
    intervals = np.array(
        [np.geomspace(low, one * WIDEST, NUM_INTERVALS) for low, one in zip(lows, advised, strict=True)]
    )
    for case, own in zip(cases, intervals, strict=True):
        if case.upload_s is not None and own[0] < (border_s := case.upload_s - case.pause_s) < own[-1]:
            own[np.searchsorted(own, border_s)] = border_s  # from which on every save is uploaded as it comes
    lost = lost_shares(cases, intervals, num_interruptions, rng)
    rows = []
    for case, advised_s, own_intervals, own_lost in zip(cases, advised, intervals, lost, strict=True):
        border_s = 0.0 if case.upload_s is None else case.upload_s - case.pause_s
        curve = Curve(own_intervals, own_lost, border_s)
        best_s = curve.best_s()
        more = curve.at(advised_s) / curve.at(best_s) - 1
        rows.append(
            {
                **{name: round(value, 4) for name, value in vars(case).items() if type(value) is float},
                "advised_s": round(advised_s, 2),
                "best_s": round(best_s, 2),
                "interval_off": round(advised_s / best_s - 1, 4),
                "lost_more": round(more, 5),
                "lost_share": round(curve.at(advised_s), 5),
                "predicted_share": round(case.lost_share(advised_s), 5),
            }
        )
    offs = np.abs([row["interval_off"] for row in rows])
    more_lost = np.array([row["lost_more"] for row in rows])
    return {
        "num_settings": num,
        "num_interruptions": num_interruptions,
        "seed": seed,
        "interval_off": {
            "median": float(np.median(offs)),
            "p95": float(np.quantile(offs, 0.95)),
            "max": float(offs.max()),
        },
        "num_intervals_within_5_percent": int((offs <= 0.05).sum()),
        "lost_more": {"median": float(np.median(more_lost)), "max": float(more_lost.max())},
        "num_losses_within_5_percent": int((more_lost <= 0.05).sum()),
        "settings": rows,
    }


def predicted_saves(folder: Path, rounds: int) -> list[dict[str, float]]:
    """Of five sizes the median time until a save is committed, and that predicted by a save of another size: the next smaller
    one, and for the smallest the next. An older checkpoint is removed between two saves."""
    import torch

    import loaderkit
    from loaderkit.checkpoint.timing.costs import CostLog

    megabytes = [128, 256, 512, 1024, 2048]
    logs: list[CostLog] = [CostLog() for _ in megabytes]
    took: list[list[float]] = [[] for _ in megabytes]
    with ExitStack() as stack:
        managers = [stack.enter_context(loaderkit.CheckpointManager(folder / str(size))) for size in megabytes]
        states = [{"x": [torch.ones(size * 250_000 // 20) for _ in range(20)]} for size in megabytes]
        for step in range(rounds + 1):  # the sizes in turn, as a disk is faster at one time than at another
            for size, checkpoints, state, log, times_s in zip(megabytes, managers, states, logs, took, strict=True):
                for older in (folder / str(size)).glob("step-*"):
                    shutil.rmtree(older)
                begin_s = time.perf_counter()
                saving = checkpoints.save(step, state, wait=True)
                assert saving is not None
                if step:  # the first one makes the memory that the others use again
                    times_s.append(time.perf_counter() - begin_s)
                    log.add(saving.stats)
    times = [float(np.median(times_s)) for times_s in took]
    rows = []
    for place, size in enumerate(megabytes):
        other = place - 1 if place else 1
        cost = logs[other].typical()
        assert cost is not None
        predicted_s = cost.saving_s(size / megabytes[other])
        rows.append(
            {
                "megabytes": size,
                "took_s": times[place],
                "predicted_s": predicted_s,
                "off": predicted_s / times[place] - 1,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--saves", action="store_true", help="a save's time at five sizes on this machine, instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.saves:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for row in predicted_saves(Path(folder), args.rounds):
                print(
                    "{megabytes:6.0f} MB: took {took_s:.3f} s, predicted {predicted_s:.3f} s ({off:+.1%})".format(**row)
                )
        return
    result = simulate(args.settings, args.seed)
    json.dump({name: value for name, value in result.items() if name != "settings"}, sys.stdout, indent=1)
    print()
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
