"""What it costs that batches come in order and workers take turns: simulated with the times of samples that were measured.

Worker i of W makes the batches i, i + W, ... one after the other, and may be D batches ahead of the loop:

    done(k)  = max(done(k - W), taken(k - W D)) + service(k)
    taken(k) = max(taken(k - 1), done(k))               a loop that takes every batch at once

The share of the workers' capacity that comes out is what is left of 1. A loop that is slower hides more.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli.demo.photos import demo_data

WORKERS = (8, 64, 512)
DEPTHS = (1, 2, 4, 8)
BATCH = 64
_NUM_IMAGES = 320
_ROUNDS = 400
_WARM = 40
_RARE, _LONG = 1e-3, 100.0  # one sample in a thousand takes a hundred times as long
_SLOW_SHARE, _SLOW_SPEED = 0.1, 0.5
Times = NDArray[np.float64]


def sample_times(num_epochs: int = 4) -> Times:
    """CPU seconds of single pictures, from bytes in the page cache to a normalised crop of 224, by one thread."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = (
            Pipeline.files(demo_data(Path(folder), _NUM_IMAGES), include="**/*.jpg")
            .shuffle(seed=0)
            .read()
            .decode()
            .random_resized_crop(224)
            .random_horizontal_flip()
            .batch(1)
            .normalize(mean="imagenet", std="imagenet")
        )
        found = []
        with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
            for epoch in range(num_epochs):
                batches = iter(loader)
                for _ in range(_NUM_IMAGES):
                    begin_s = time.thread_time()
                    next(batches)
                    if epoch:  # the first one warms up
                        found.append(time.thread_time() - begin_s)
                next(batches, None)
    return np.array(found)


def share(services: Times, depth: int) -> float:
    """Of the capacity of workers, the share that comes out in order: services are float64 [rounds, workers], in s."""
    rounds, workers = services.shape
    taken = np.zeros((rounds + depth, workers))  # those before the first are 0
    done = np.zeros(workers)
    last_s = 0.0
    for number in range(rounds):
        done = np.maximum(done, taken[number]) + services[number]
        taken[number + depth] = np.maximum.accumulate(np.maximum(done, last_s))
        last_s = float(taken[number + depth, -1])
    took_s = last_s - taken[_WARM + depth - 1, -1]
    capacity = float((1.0 / services.mean(axis=0)).sum())  # batches a second
    return float((rounds - _WARM) * workers / took_s / capacity)


def kinds(samples: Times) -> dict[str, Any]:
    """How services of batches are drawn, given (rng, rounds, workers)."""

    def pictures(rng: np.random.Generator, rounds: int, workers: int) -> Times:
        drawn: Times = rng.choice(samples, (rounds, workers, BATCH)).sum(axis=2)
        return drawn

    def rare(rng: np.random.Generator, rounds: int, workers: int) -> Times:
        num_slow = rng.binomial(BATCH, _RARE, (rounds, workers)).astype(np.float64)
        return pictures(rng, rounds, workers) + num_slow * (_LONG - 1) * float(samples.mean())

    def exponential(rng: np.random.Generator, rounds: int, workers: int) -> Times:
        return rng.exponential(BATCH * samples.mean(), (rounds, workers))

    def slow_nodes(rng: np.random.Generator, rounds: int, workers: int) -> Times:
        speeds = np.where(np.arange(workers) < max(1, round(_SLOW_SHARE * workers)), _SLOW_SPEED, 1.0)
        return pictures(rng, rounds, workers) / speeds

    return {
        f"pictures, {BATCH} a batch": pictures,
        f"the same, one sample in {round(1 / _RARE):,} takes {_LONG:.0f} times as long": rare,
        "batches of exponential times": exponential,
        f"pictures, {100 * _SLOW_SHARE:.0f} % of the workers at {_SLOW_SPEED} of the speed": slow_nodes,
    }


def measure() -> dict[str, Any]:
    """The times of samples in short, and the share for every kind, number of workers and depth."""
    samples = sample_times()
    rows = []
    for name, draw in kinds(samples).items():
        for workers in WORKERS:
            services = draw(np.random.default_rng(0), _ROUNDS, workers)
            rows.append({"kind": name, "workers": workers, **{str(depth): share(services, depth) for depth in DEPTHS}})
    quantiles = np.quantile(samples, (0.5, 0.99, 1.0)).tolist()
    return {
        "mean_s": float(samples.mean()), "p50_s": quantiles[0], "p99_s": quantiles[1], "most_s": quantiles[2],
        "num": len(samples), "rows": rows,
    }  # fmt: skip
