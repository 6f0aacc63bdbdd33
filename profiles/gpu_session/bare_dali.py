"""Our DALI pipelines without the loader, and the time of the loader's parts around them: what limits decoding on a GPU."""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from loaderkit import native
from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.stages.image.dali import renderer
from loaderkit.stages.image.dali.graph import Graph, build_pipeline, import_dali, inputs_of
from loaderkit.stages.image.ops import Finalizer
from profiles.gpu_session.context import Context
from profiles.gpu_session.gpu_decoding import MEAN, STD
from profiles.gpu_session.pictures_pipeline import SIZE

Sums = dict[str, list[float]]


def bare_pipelines(context: Context, num_pipelines: int) -> Iterator[torch.Tensor]:
    """Batches of `num_pipelines` pipelines, each in a thread that feeds it the same photographs again and again; they share the
    CPUs as the loader's do."""
    size = context.sized(256, 16)
    described = [STAGES["random_resized_crop"], STAGES["random_horizontal_flip"]]
    stages = []
    for kind, arguments in zip(described, ({"size": SIZE}, {}), strict=True):
        assert kind.ops is not None
        stages.append((kind.args.__name__, kind.ops(kind.args.model_validate(arguments))))
    mean, std = (tuple(255 * value for value in values) for values in (MEAN, STD))
    graph = Graph(
        tuple(stages),
        Finalizer(mean, std, torch.float32),
        size,
        0 if context.on_gpu else None,
        max(1, num_cpus() // num_pipelines),
    )
    files = [path.read_bytes() for path in sorted(context.photos().rglob("*.jpg"))[:size]]
    fed = _inputs(graph, files)
    ready: queue.Queue[Any] = queue.Queue(1)
    is_over = threading.Event()

    def work() -> None:
        pipeline = build_pipeline(import_dali(), graph)
        while not is_over.is_set():
            for name, values in fed.items():
                pipeline.feed_input(name, values)
            (output,) = pipeline.run()
            ready.put(from_dlpack(output.as_tensor()).clone())
            if context.on_gpu:
                torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_pipelines)]
    for thread in threads:
        thread.start()
    try:
        while True:
            yield ready.get()
    finally:
        is_over.set()
        while any(thread.is_alive() for thread in threads):
            try:
                ready.get(timeout=0.1)
            except queue.Empty:
                continue


def _inputs(graph: Graph, files: list[bytes]) -> dict[str, Any]:
    """What a batch of files is fed as, with crops and flips of its own."""
    rng = np.random.default_rng(0)
    rows = []
    for data in files:
        size = native.whole_jpeg_size(memoryview(data))
        assert size is not None
        rows.append([step for _, stage in graph.stages for step in stage.of(*size, rng.random(22))])
    fed: dict[str, Any] = {"encoded": [np.frombuffer(data, np.uint8) for data in files]}
    for number, column in enumerate(zip(*rows, strict=True)):
        fed |= {f"{name}-{number}": values for name, values in inputs_of(column).items()}
    return fed


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Filled at the end with ms a batch of a renderer and its parts (`built`: s a pipeline), by the clock, and of the thread's
    CPU time."""
    sums: Sums = {}
    found: dict[str, float] = {}
    pipeline: Any = importlib.import_module("nvidia.dali.pipeline").Pipeline
    places = {
        "renderer": (renderer.Renderer, "__call__"),
        "built": (renderer.Renderer, "_built"),
        "jobs": (renderer.Renderer, "_jobs"),
        "taken_over": (renderer.Renderer, "_rows"),
        "cpu_path": (renderer.Renderer, "_on_the_cpu"),
        "feed": (pipeline, "feed_input"),
        "run": (pipeline, "run"),
    }
    with ExitStack() as stack:
        for name, (owner, function) in places.items():
            stack.enter_context(mock.patch.object(owner, function, _timed(sums, name, getattr(owner, function))))
        yield found
    num_batches = max(1.0, sums.get("renderer", [0.0])[0])
    num_built, built_s, _ = sums.pop("built", [0.0, 0.0, 0.0])
    found.update(num_built=num_built, built_each_s=built_s / max(1.0, num_built))
    for name, (_, wall_s, cpu_s) in sums.items():
        found[f"{name}_ms"] = 1000 * wall_s / num_batches
        found[f"{name}_cpu_ms"] = 1000 * cpu_s / num_batches


def _timed(sums: Sums, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            total = sums.setdefault(name, [0.0, 0.0, 0.0])
            for place, more in enumerate((1.0, time.perf_counter() - wall_s, time.thread_time() - cpu_s)):
                total[place] += more

    return call
