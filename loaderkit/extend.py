"""For other packages and programs: what kinds of sources and stages, and connectors, are made of, and `register`, which
adds one.

A package declares entry points, in the groups `loaderkit.sources`, `loaderkit.stages` and `loaderkit.connectors`:

    [project.entry-points."loaderkit.stages"]
    solarize = "photo_tools.solarize:SOLARIZE"

A script, or a notebook, calls `register("solarize", SOLARIZE)`. loaderkit's own kinds are made of the same parts.
"""

from __future__ import annotations

from loaderkit._internal.config.settings import ByteSize, Duration, Model
from loaderkit.connectors.base import (
    BulkConnector,
    BulkReads,
    ByteRange,
    Connector,
    ConnectorTraits,
    ObjectInfo,
    Ranges,
    Writes,
)
from loaderkit.connectors.config import SourceArgs, StoreArgs
from loaderkit.connectors.factory import CONNECTORS, ConnectorFactory, scheme_of
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.builder import Pipeline
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.samples.chunk import BatchContext, SampleChunk
from loaderkit.samples.sample import FieldRange, Sample, Table
from loaderkit.samples.values import Encoded, Image
from loaderkit.sources.bad_shards import BadShards
from loaderkit.sources.base import ReadContext, Reader, Source, SourceKind
from loaderkit.sources.sample_reader import SampleReader
from loaderkit.stages.base import FieldNames, StageArgs, StageConfig
from loaderkit.stages.context import CompileContext, StageKind
from loaderkit.stages.values import image_fields, to_tensor

__all__ = [
    "BadShards",
    "BatchContext",
    "BulkConnector",
    "BulkReads",
    "ByteRange",
    "ByteSize",
    "CompileContext",
    "Connector",
    "ConnectorFactory",
    "ConnectorTraits",
    "Duration",
    "Encoded",
    "FieldNames",
    "FieldRange",
    "Image",
    "Model",
    "ObjectInfo",
    "Ranges",
    "ReadContext",
    "Reader",
    "Sample",
    "SampleChunk",
    "SampleReader",
    "Source",
    "SourceArgs",
    "SourceKind",
    "StageArgs",
    "StageConfig",
    "StageKind",
    "StoreArgs",
    "Table",
    "Writes",
    "image_fields",
    "register",
    "to_tensor",
]


def register(name: str, item: SourceKind | StageKind | ConnectorFactory) -> None:
    """Give `name` a meaning in this program: a kind of source, a stage, or with a class or function (url, args) -> Connector
    the scheme of URLs `name://`. It is sent to worker processes, and refused there if it cannot be pickled. If it is
    registered again from the same place, as by a notebook's cell, it replaces the earlier one.

    Raises ConfigError for a name that loaderkit or another part of the program has, and for any other object. A name that an
    installed package has, too, is an error where it is used.
    """
    if isinstance(item, SourceKind):
        _check_method(name)
        SOURCES.register(name, item)
    elif isinstance(item, StageKind):
        _check_method(name)
        STAGES.register(name, item)
    elif not callable(item) or (isinstance(item, type) and issubclass(item, (Source, Model))):
        raise ConfigError(
            f"register({name!r}): {item!r} is no SourceKind, no StageKind and makes no connector of a URL"
        )
    else:
        if scheme_of(f"{name}://") != name or name.startswith("fsspec+"):
            raise ConfigError(
                f"register({name!r}): no URL has this scheme: it begins with a letter, and has lower-case letters, digits, +, "
                "- and . in it; fsspec+... is a filesystem of fsspec"
            )
        factory: ConnectorFactory = item  # type: ignore[assignment]  # mypy takes it for any class
        CONNECTORS.register(name, factory)


def _check_method(name: str) -> None:
    """Raise ConfigError if a kind of this name could not be a method of `Pipeline`."""
    if not name.isidentifier() or name.startswith("_"):
        raise ConfigError(f"register({name!r}): a kind is a method of Pipeline, too: letters, digits and _")
    is_method = any(name in vars(base) for base in Pipeline.__mro__)  # `hasattr` finds kinds, too
    if is_method and name not in SOURCES.ours and name not in STAGES.ours:
        raise ConfigError(f"register({name!r}): Pipeline.{name} is something else: choose another name")
