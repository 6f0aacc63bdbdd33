"""The rule that makes tiny batches inline, in the loop's thread, under `executor: thread`."""

from __future__ import annotations

from loaderkit._internal.system.cgroups import free_memory
from loaderkit._internal.units import say_bytes
from loaderkit.connectors.base import Connector
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.layers.retry_layer import RetryConnector
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.sources.base import Source

# Such a batch takes about 0.2 ms; the wake-up of another thread and two passes of the GIL take 0.1 ms.
_TINY_BYTES, _FEW_READS = 128 * 1024, 128
_CACHED_SHARE = 0.5  # of the memory that is free or holds cached files: data of that size stays in the page cache


def why_inline(config: PipelineConfig, source: Source, connector: Connector | None) -> str | None:
    """The reason to make batches inline under `executor: thread`, or None if there is none.

    The rule applies to a pipeline that sets nothing of `prefetch` and `workers`, with stages without the user's code,
    and data in the page cache.
    """
    given = config.prefetch.model_fields_set - ({"executor"} if config.prefetch.executor == "auto" else set())
    if given or any(stage.args.workers != "auto" for stage in config.stages):
        return None
    store = connector.inner if isinstance(connector, RetryConnector) else connector
    if type(store) is not FileConnector or [stage.kind for stage in config.stages] != ["read", "batch"]:
        return None
    size, packed = config.batch_size, source.packed()
    if packed is None or size is None:
        return None
    num_bytes = size * (packed.num_bytes // len(source))
    if size * packed.num_reads // len(source) > _FEW_READS or num_bytes > _TINY_BYTES:
        return None
    if packed.stored_bytes > _CACHED_SHARE * (free_memory()[0] or 0):
        return None
    return f"a batch of {say_bytes(num_bytes)} takes longer to hand over than to make"
