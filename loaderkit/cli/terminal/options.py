"""The arguments and options that several commands take, and how their texts become values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from loaderkit.pipeline.config.model import PipelineConfig
    from loaderkit.pipeline.execution_plan import ExecutionPlan


@dataclass
class Settings:
    """The options of the command line that are for `main` itself."""

    debug: bool = False
    then: Callable[[], int] | None = None  # run once the command line is done with, and give the exit code


def _note_debug(context: typer.Context, value: bool) -> bool:
    if value and isinstance(context.obj, Settings):
        context.obj.debug = True
    return value


PipelineFile = Annotated[Path, typer.Argument(metavar="P", help="A pipeline's YAML file.", show_default=False)]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one value of the pipeline, as in --set stages.batch.size=32; may be repeated.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", callback=_note_debug, help="Show the whole traceback of an error.")]


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """{"stages.batch.size": 32} from ["stages.batch.size=32"]; values are read as YAML."""
    from loaderkit._internal.config.yaml_text import YAML_ERRORS, from_yaml

    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(f"{assignment!r} is not KEY=VALUE, as in stages.batch.size=32", param_hint="--set")
        try:
            # YAML would take the star of "*.jpg" for a reference, and the others for signs that mean nothing here.
            values[key.strip()] = text if text.startswith(("*", "&", "!", "%", "@")) else from_yaml(text)
        except YAML_ERRORS as error:
            problem = getattr(error, "problem", None) or error
            raise typer.BadParameter(f"the value of {key} is not YAML: {problem}", param_hint="--set") from error
    return values


def described(pipeline: Path | Mapping[str, Any], assignments: Sequence[str] | None) -> PipelineConfig:
    """The config of the file, or of the mapping, with `--set` applied."""
    from loaderkit.pipeline.config.builder import to_config

    return to_config(pipeline, parse_assignments(assignments or []))


def open_plan(
    pipeline: Path | Mapping[str, Any], assignments: Sequence[str] | None, *, on_this_thread: bool = False
) -> ExecutionPlan:
    """The plan of the pipeline, with its source listed; nothing runs yet. Raises LoaderkitError."""
    from loaderkit.pipeline.execution_plan import compile_pipeline
    from loaderkit.ranks.place import ranks_now

    if on_this_thread:
        assignments = [*(assignments or []), "prefetch.executor=inline", "prefetch.processes=1", "prefetch.ray={}"]
    rank, world_size = ranks_now()
    return compile_pipeline(described(pipeline, assignments), rank=rank, world_size=world_size)


def checkpoint_config(pipeline: Path, assignments: Sequence[str] | None) -> PipelineConfig | None:
    """The description of a pipeline whose source is a checkpoint, which has tensors and no batches; None for any other."""
    from loaderkit.pipeline.config.checkpoint_source import CheckpointArgs

    config = described(pipeline, assignments)
    return config if isinstance(config.source, CheckpointArgs) else None
