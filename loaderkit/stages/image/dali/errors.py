"""Interprets DALI's errors: what DALI says when it fails, and whether an image can have caused it."""

from __future__ import annotations

from loaderkit.stages.image.dali.graph import Graph

_MEMORY = (
    "allocation failed",
    "bad_alloc",
    "out of memory",
    "cudaErrorMemoryAllocation",
    "failure: '#5'",
    "failure: '#15'",
)


def reason_of(error: Exception) -> str:
    """What DALI says, without the source lines and paths before it."""
    return str(error).rpartition("encountered:")[2].strip()


def system_failure(error: Exception, graph: Graph) -> str | None:
    """The message for an error of DALI that no image can have caused; None if an image may have.

    DALI has one type for all errors, so the text tells them apart. 5 and 15 are nvImageCodec's numbers for a failed allocation.
    """
    reason = reason_of(error)
    if any(text in reason for text in _MEMORY):
        where = "the machine" if graph.device is None else f"GPU {graph.device}"
        return (
            f"{where} has no memory for what DALI needs for a batch of {graph.batch_size} ({reason.splitlines()[0]}): make "
            "stages.batch.size smaller, or prefetch.batches: each batch in progress uses one DALI pipeline"
        )
    if "CUDA" in reason:
        return f"DALI cannot use the GPU any more, independent of the images: {reason}"
    return None
