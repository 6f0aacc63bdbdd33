"""Writes a ported pipeline: its YAML and, beside it, the tensors that are in no file yet."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from loaderkit._internal.atomic_file import write_atomically
from loaderkit.pipeline.config.builder import Pipeline
from loaderkit.profile.port.loader import PortedPipeline

_WIDTH = 110


def write_pipeline(ported: PortedPipeline, path: Path, made_by: str) -> list[Path]:
    """Write the file at `path`, which the caller has found to be free, and `PATH-tensors.pt`; returns all paths that
    were written. Raises OSError, ConfigError."""
    assert ported.pipeline is not None
    assert ported.source is not None
    written, pipeline = [path], ported.pipeline
    if ported.source.tensors:
        file = tensors_beside(path)
        _save([*ported.source.tensors], file)
        pipeline = {**pipeline, "source": {**pipeline["source"], "args": {"file": os.fspath(file.absolute())}}}
        written.append(file)
    lines = [f"made by {made_by}: the same samples as of the script's DataLoader", *ported.notes]
    comment = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    write_atomically(path, f"{comment}{Pipeline(pipeline).to_yaml()}")
    return written


def tensors_beside(path: Path) -> Path:
    """The file for tensors of the pipeline at `path`."""
    return path.with_name(f"{path.stem}-tensors.pt")


def _save(tensors: list[torch.Tensor], file: Path) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        torch.save(tensors, temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
