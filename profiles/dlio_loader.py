"""loaderkit as a data loader of DLIO, for profiles/utilisation.py.

The environment names the pipeline, LOADERKIT_PIPELINE, and a file for the report on DLIO's loop, LOADERKIT_REPORT."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

import loaderkit
from loaderkit.loader import Loader

_loaders: list[Loader] = []  # DLIO makes a data loader for every epoch


class LoaderkitLoader(BaseDataLoader):  # type: ignore[misc] # DLIO is not installed where types are checked
    """The batches of one epoch."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch: int) -> None:
        super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)

    def read(self) -> None:
        """Build the loader, the first time."""
        if not _loaders:
            stack = ExitStack()
            _loaders.append(stack.enter_context(loaderkit.build(os.environ["LOADERKIT_PIPELINE"])))
            recording = _loaders[0].profile()
            stack.callback(lambda: recording.save(os.environ["LOADERKIT_REPORT"]))
            stack.enter_context(recording)
            atexit.register(stack.close)

    def next(self) -> Iterator[Any]:
        """An epoch."""
        yield from _loaders[0]

    def finalize(self) -> None:
        """The loader serves the next epoch as well."""
