"""Keys of a pipeline's file, for error messages of modules that do not know the file: an error names the key to change."""

from __future__ import annotations

BATCH_SIZE = "stages.batch.size"
BATCHES = "prefetch.batches"
CONCURRENCY = "prefetch.concurrency"
EXECUTOR = "prefetch.executor"
MEMORY = "prefetch.memory"
RAY = "prefetch.ray"
RESTARTS = "prefetch.restarts"
TIMEOUT = "prefetch.timeout"

LESS_MEMORY = f"make {MEMORY}, {CONCURRENCY} or the data set's own memory smaller"
