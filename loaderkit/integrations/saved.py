"""Data sets in files that `loaderkit port` finds or writes, as `source.object` of a pipeline names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset


def tensors(file: str) -> TensorDataset:
    """The tensors of one `torch.save([...])`, whose first dimension counts the samples; the file is mapped, not read.

    Raises OSError, and what torch.load raises for another file.
    """
    return TensorDataset(*torch.load(file, mmap=True, weights_only=True))


def arrow_files(files: Sequence[str], format: str | None = None, columns: Sequence[str] | None = None) -> Any:  # noqa: A002
    """Arrow files of Hugging Face's `datasets`, one behind the other, as one data set; `format` and `columns` are the
    arguments of its `with_format`. Raises what `datasets` raises."""
    import datasets

    parts = [datasets.Dataset.from_file(file) for file in files]
    joined = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    return joined.with_format(format, columns=None if columns is None else [*columns])
