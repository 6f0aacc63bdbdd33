"""`loaderkit index --lengths`: measures the lengths of a pipeline's samples, from which `pack`, or `batch` with
`tokens`, is planned."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from loaderkit.cli.experiments import progress
from loaderkit.cli.terminal import console
from loaderkit.errors import ConfigError, ConnectorError


def index_lengths(path: Path, as_json: bool) -> None:
    """Take all samples, once, through the stages before the one that is planned by their lengths, and keep the lengths
    in the user's cache directory. Raises LoaderkitError."""
    import numpy as np

    from loaderkit.pipeline.config.mixture import MixtureArgs, mixture_args
    from loaderkit.pipeline.config.parsing import load_yaml
    from loaderkit.pipeline.execution_plan import compile_pipeline
    from loaderkit.pipeline.lengths import known_lengths, length_index, measure_lengths, planned_stage
    from loaderkit.stages.batch import BatchArgs

    config = load_yaml(path)
    stage = planned_stage(config)
    if stage is None:
        raise ConfigError(f"{path}: there is neither `pack` nor `tokens` in `batch`, and only they need lengths")
    number = config.stages.index(stage)
    before = replace(config, stages=(*config.stages[:number], replace(config.stage("batch"), args=BatchArgs(size=1))))
    if isinstance(config.source, MixtureArgs):  # by tokens it would need the lengths that are looked for
        mix = config.source.mix.model_copy(update={"by": "sample"})
        before = replace(before, source=mixture_args(config.members, mix))
    plan = compile_pipeline(replace(before, output=None), rank=0, world_size=1)
    with closing(plan):
        index = length_index(config, plan.source)
        lengths = known_lengths(config, plan.source)
        is_known, num_bad = lengths is not None, 0
        if lengths is None:
            with progress("samples", len(plan.source)) as show:
                parts = []
                num_measured = 0
                raises = config.errors.on_bad_sample == "raise"
                measured = measure_lengths(plan.source, plan.compiled.stages, stage, config.prefetch, raises=raises)
                with closing(measured):
                    for part, num_bad_here in measured:
                        parts.append(part)
                        num_bad += num_bad_here
                        num_measured += len(part)
                        show(num_measured)
            lengths = np.concatenate(parts)
            try:
                index.save(lengths, num_bad)
            except OSError as error:
                raise ConnectorError(
                    f"{index.path} cannot be written ({error.strerror}): make room, or set $LOADERKIT_CACHE_DIR"
                ) from error
    facts = {
        "num_documents": len(lengths),
        "num_tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "num_empty": len(lengths) - int(np.count_nonzero(lengths)),
        "num_bad": num_bad,
        "index": None if is_known else str(index.path),
    }
    if as_json:
        console.tell_json(facts)
        return
    kept = "known from the source, so nothing is kept" if is_known else f"kept in {index.path}"
    console.tell(f"{len(lengths)} documents, {facts['num_tokens']} tokens, the longest {facts['longest']}: {kept}")
    if facts["num_empty"]:
        console.tell(f"{facts['num_empty']} of them are empty or dropped, {num_bad} of these bad: they are in no batch")
