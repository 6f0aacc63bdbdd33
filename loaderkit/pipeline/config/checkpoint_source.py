"""The arguments of `source: {kind: checkpoint}`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from loaderkit.connectors.config import SourceArgs
from loaderkit.sources.base import SourceKind


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class CheckpointArgs(SourceArgs):
    """The tensors of a checkpoint: safetensors, torch.save or torch.distributed.checkpoint."""

    kind: Literal["checkpoint"] = "checkpoint"
    url: Annotated[str, Field(min_length=1, description="a file, a directory, or either in a tar")]
    keys: Annotated[Annotated[tuple[str, ...], Field(min_length=1)] | None, BeforeValidator(_as_list)] = Field(
        None, description="only names that match one of these globs; default: all"
    )
    dtype: str | None = Field(None, description="cast floating-point tensors to this: bfloat16, float16, float32, ...")
    verify: Literal["auto"] | bool = Field(
        "auto", description="auto: compare with the manifest if there is one; true: demand one; false: do not look"
    )


CHECKPOINT = SourceKind(CheckpointArgs, has_samples=False)
