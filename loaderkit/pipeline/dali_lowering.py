"""Lowers stages to DALI, for `decode: {device: gpu}` and `{device: dali-cpu}`: the stages that DALI runs become one
stage, beside the CPU's path for images that DALI cannot decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit.engine.work import Stage
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.samples.chunk import SampleChunk
from loaderkit.sampling.random import uniforms
from loaderkit.stages.base import StageConfig
from loaderkit.stages.context import CompileContext
from loaderkit.stages.image.dali.graph import Graph
from loaderkit.stages.image.dali.renderer import Renderer
from loaderkit.stages.image.dali.trial import decodes_regions
from loaderkit.stages.image.decode import DecodeArgs
from loaderkit.stages.image.normalize import NormalizeArgs, finish_of, normalize


@dataclass(frozen=True)
class DaliLowering:
    """The stages that DALI runs: all from `decode` to `batch`, and `normalize`, if only `transfer` comes before it."""

    decode: StageConfig
    between: tuple[StageConfig, ...]  # decode and batch
    normalize: StageConfig | None
    graph: Graph

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """All of them, `decode` first."""
        last = () if self.normalize is None else (self.normalize,)
        return (self.decode, *self.between, *last)

    def compile(self, context: CompileContext) -> Stage:
        """The one stage that runs them."""
        args = self.decode.args
        assert isinstance(args, DecodeArgs)
        keys = {stage.name: context.keys(stage) for stage in self.stages}
        num_draws = {stage.name: context.kind_of(stage).num_draws for stage in self.stages}
        on_cpu = replace(self.decode, args=args.model_copy(update={"device": "cpu"}))
        plain = [context.compile(stage).run for stage in self.between]

        def run_plain(chunk: SampleChunk) -> None:
            for run in plain:
                run(chunk)

        renderer = Renderer(
            self.graph,
            name=self.decode.name,
            fields=args.fields,
            takes_jpegs="jpeg" in args.formats,
            max_pixels=args.max_pixels,
            draws=lambda name, chunk: uniforms(keys[name][chunk.epoch], keys[name].numbers(chunk), num_draws[name]),
            decode=context.compile(on_cpu).run,
            plain=run_plain,
            finish=self._finish(context),
            on_gpu_error=args.on_gpu_error,
        )
        stream = context.early_stream
        render = renderer if stream is None else partial(stream.run, renderer)
        return self.decode.ready("sample", render, close=renderer.close)

    def _finish(self, context: CompileContext) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that finishes images decoded by the CPU."""
        args = None if self.normalize is None else self.normalize.args
        scale = normalize(args) if isinstance(args, NormalizeArgs) else None
        device = "cpu" if context.early_stream is None else context.early_stream.device

        def finish(images: torch.Tensor) -> torch.Tensor:
            if scale is None:
                return images.clone().to(device)  # copied, since the next chunk reuses their memory
            batch = {"image": images}
            scale(batch, ["image"])
            return batch["image"].to(device)

        return finish


def lower(config: PipelineConfig, decode: StageConfig, device: torch.device | None, num_workers: int) -> DaliLowering:
    """The stages that DALI runs. `device` is the target of `transfer`, None the CPU. Raises ConfigError.

    With `executor: process` stages behind a `transfer` to CUDA run in the trainer's process, not in DALI.
    """
    args, stages = decode.args, config.stages
    assert isinstance(args, DecodeArgs)
    if args.device == "gpu":
        _check_gpu(device)
    border = [stage.kind for stage in stages].index("batch")
    between = stages[stages.index(decode) + 1 : border]
    is_elsewhere = device is not None and config.prefetch.is_remote
    behind = [s for s in stages[border + 1 :] if is_elsewhere or not STAGES[s.kind].keeps_values(s.args)]
    last = behind[0] if behind else None
    finalizer = None
    if last is None or not isinstance(last.args, NormalizeArgs) or last.args.fields is not None:
        last = None
    else:
        try:
            finalizer = finish_of(last.args)
        except ValueError as error:
            raise ConfigError(f"stages.{last.name}: {error}") from error
    described = []
    for stage in between:
        ops = STAGES[stage.kind].ops
        assert ops is not None
        described.append((stage.name, ops(stage.args)))
    number = device.index if args.device == "gpu" and device is not None else None
    num_threads = _num_threads(config, decode, num_workers)
    assert config.batch_size is not None  # `batch` refuses `tokens`
    graph = Graph(tuple(described), finalizer, config.batch_size, number, num_threads, args.regions is not False)
    if args.regions == "auto" and number is not None and graph.crops_first:
        graph = replace(graph, regions=decodes_regions(number))
    return DaliLowering(decode, between, last, graph)


def _num_threads(config: PipelineConfig, decode: StageConfig, num_workers: int) -> int:
    """The threads of one DALI pipeline. A chunk is a whole batch, so no more pipelines work at once than batches are open;
    they share the CPUs."""
    num_threads = min(num_workers, num_cpus())
    workers = num_threads if decode.args.workers == "auto" else decode.args.workers
    return max(1, num_threads // min(workers, config.prefetch.first_batches))


def _check_gpu(device: torch.device | None) -> None:
    prefix = "stages.decode.device: gpu"
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ConfigError(
            f"{prefix}: torch {torch.__version__}, {built}, sees no CUDA device: use `cpu`, or `dali-cpu`, which runs the "
            "same operators on the CPU"
        )
    if device is None:
        raise ConfigError(f"{prefix}: batches stay on the CPU: put `transfer: {{device: auto}}` behind `batch`")
