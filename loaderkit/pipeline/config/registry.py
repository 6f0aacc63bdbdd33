"""The kinds of sources and stages. To add one of ours, write its module, which declares its kind, and add a line here; packages
and programs add theirs by `loaderkit.extend`."""

from __future__ import annotations

from loaderkit._internal.extensions import Registry
from loaderkit.connectors.config import SourceArgs
from loaderkit.pipeline.config.checkpoint_source import CHECKPOINT
from loaderkit.sources.base import SourceKind
from loaderkit.sources.containers.hdf5 import HDF5
from loaderkit.sources.containers.zarr import ZARR
from loaderkit.sources.files.source import FILES
from loaderkit.sources.huggingface.source import HUGGINGFACE
from loaderkit.sources.objects.dataset import DATASET
from loaderkit.sources.objects.iterable import ITERABLE
from loaderkit.sources.parquet.source import PARQUET
from loaderkit.sources.parquet.tokens import open_documents
from loaderkit.sources.records.array import ARRAY
from loaderkit.sources.sequences.tokens import tokens_kind
from loaderkit.sources.serial.lines import LINES
from loaderkit.sources.serial.mds import MDS
from loaderkit.sources.serial.tfrecord import TFRECORD
from loaderkit.sources.tar.source import TAR
from loaderkit.stages.base import StageArgs
from loaderkit.stages.batch import BATCH
from loaderkit.stages.call import CALL, FILTER
from loaderkit.stages.context import StageKind
from loaderkit.stages.expand import EXPAND
from loaderkit.stages.image import color, geometry
from loaderkit.stages.image.decode import DECODE
from loaderkit.stages.image.normalize import NORMALIZE
from loaderkit.stages.image.sanitize_boxes import SANITIZE_BOXES
from loaderkit.stages.read import READ
from loaderkit.stages.sequence.pack import PACK
from loaderkit.stages.sequence.tokenize import TOKENIZE
from loaderkit.stages.transfer import TRANSFER
from loaderkit.stages.volume import moves

SOURCES: Registry[SourceKind] = Registry(
    "sources",
    "kind of source",
    "a loaderkit.extend.SourceKind whose `args` derive from SourceArgs",
    lambda item: isinstance(item, SourceKind) and issubclass(item.args, SourceArgs),
    {
        "files": FILES,
        "tar": TAR,
        "array": ARRAY,
        "tokens": tokens_kind(open_documents),
        "parquet": PARQUET,
        "huggingface": HUGGINGFACE,
        "zarr": ZARR,
        "hdf5": HDF5,
        "lines": LINES,
        "tfrecord": TFRECORD,
        "mds": MDS,
        "dataset": DATASET,
        "iterable": ITERABLE,
        "checkpoint": CHECKPOINT,
    },
)

STAGES: Registry[StageKind] = Registry(
    "stages",
    "stage",
    "a loaderkit.extend.StageKind whose `args` derive from StageArgs",
    lambda item: isinstance(item, StageKind) and issubclass(item.args, StageArgs),
    {
        "read": READ,
        "decode": DECODE,
        "resize": geometry.RESIZE,
        "center_crop": geometry.CENTER_CROP,
        "random_crop": geometry.RANDOM_CROP,
        "random_resized_crop": geometry.RANDOM_RESIZED_CROP,
        "random_horizontal_flip": geometry.RANDOM_HORIZONTAL_FLIP,
        "random_vertical_flip": geometry.RANDOM_VERTICAL_FLIP,
        "random_rotation": geometry.RANDOM_ROTATION,
        "sanitize_boxes": SANITIZE_BOXES,
        "color_jitter": color.COLOR_JITTER,
        "random_grayscale": color.RANDOM_GRAYSCALE,
        "gaussian_blur": color.GAUSSIAN_BLUR,
        "random_erasing": color.RANDOM_ERASING,
        "random_volume_crop": moves.RANDOM_VOLUME_CROP,
        "random_volume_flip": moves.RANDOM_VOLUME_FLIP,
        "call": CALL,
        "filter": FILTER,
        "expand": EXPAND,
        "tokenize": TOKENIZE,
        "pack": PACK,
        "batch": BATCH,
        "normalize": NORMALIZE,
        "transfer": TRANSFER,
    },
)
