"""From the filled memory of a batch to the dict that the user gets: bad slots left out, padding, keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loaderkit.errors import StageError
from loaderkit.pipeline.batches.padding import Padding
from loaderkit.pipeline.batches.source_counts import CountBySource
from loaderkit.samples.chunk import BatchWork
from loaderkit.samples.slots import Slots
from loaderkit.samples.values import GpuDecoded


@dataclass(frozen=True)
class BatchShape:
    """What a batch looks like, besides its fields.

    `has_keys`: it has `__key__`, the samples' keys, which take as long to make as stacking numbers does. `marks_wrapped`: it
    has `__wrapped__`, the slots of samples that are read again to make ranks equal. `filters`: the names of the stages that
    drop samples. `skips_empty`: a batch of which they leave nothing is marked as empty, and no error.
    """

    size: int
    padding: Padding = field(default_factory=Padding)
    policy: Literal["raise", "skip", "replace"] = "raise"
    has_keys: bool = True
    marks_wrapped: bool = False
    filters: str = ""
    skips_empty: bool = False


class BatchAssembler:
    """Makes dicts of full `BatchWork`s; from any thread."""

    def __init__(
        self,
        keys: Callable[[int, NDArray[np.int64]], list[str]],
        shape: BatchShape,
        count: CountBySource | None = None,
        run: Callable[..., Any] | None = None,
    ) -> None:
        """`keys` names what is in slots, from (epoch, indices). `count` counts by source, if there are several. `run` calls the
        function that assembles a batch: `TransferStream.run` where fields of it lie on a GPU."""
        self._keys = keys
        self._count = count
        self._shape = shape
        self._run = run

    def finish(self, work_item: BatchWork) -> dict[str, Any]:
        """The batch for the batch stages. Raises StageError for bad samples under the policy `raise`, or if none is left."""
        if self._run is None:
            return self._assemble(work_item)
        batch: dict[str, Any] = self._run(self._assemble, work_item)
        return batch

    def _assemble(self, work_item: BatchWork) -> dict[str, Any]:
        shape, num_slots = self._shape, len(work_item)
        slots = self._kept_slots(work_item) if work_item.failures or work_item.dropped else None
        if slots is not None:
            work_item.num_skipped = num_slots - len(slots) - work_item.num_dropped
        numbers = None if self._count is None else self._count(work_item, slots)
        batch: dict[str, Any] = {}
        if slots is not None and not len(slots):
            if not shape.skips_empty:
                raise _emptied(work_item, shape.filters)
            work_item.is_empty = True
            work_item.let_go()
            return batch
        for name, spec in work_item.specs.items():
            if spec.kind == "slab":
                field = work_item.fields[name]
                if slots is not None or num_slots < shape.size:
                    field = field.part(slice(num_slots) if slots is None else slots)
                batch[name] = field.tensor
                continue
            values = work_item.values[name]
            kept = values if slots is None else [values[slot] for slot in slots]
            if spec.kind == "rendered":
                batch[name] = _stack_rows(kept)
            elif spec.kind == "starts":
                batch[name] = _bounds_of(kept, spec.shape[0], slots)
            elif spec.kind == "pad":
                batch[name], batch[f"{name}_sizes"] = shape.padding.pad(name, kept, work_item.take_bytes)
            else:
                batch[name] = kept
        if shape.padding.masks:
            batch |= shape.padding.masks_of(
                batch, [name for name, spec in work_item.specs.items() if spec.kind == "pad"]
            )
        self._add_marks(batch, work_item, slots, numbers)
        work_item.let_go()
        return batch

    def _add_marks(
        self,
        batch: dict[str, Any],
        work_item: BatchWork,
        slots: NDArray[np.int64] | None,
        numbers: NDArray[np.int64] | None,
    ) -> None:
        """Add what a batch says of its samples besides their fields. `numbers`: their sources."""
        shape, num_slots = self._shape, len(work_item)
        if shape.has_keys:
            kept_indices = work_item.indices if slots is None else work_item.indices[slots]
            batch["__key__"] = self._keys(work_item.epoch, kept_indices)
        if numbers is not None:
            batch["__source__"] = Slots(numbers, numbers.shape, "int64").tensor
        if shape.marks_wrapped:
            wrapped = np.zeros(num_slots, np.bool_) if work_item.wrapped is None else work_item.wrapped
            marks = wrapped if slots is None else wrapped[slots]
            batch["__wrapped__"] = Slots(marks, marks.shape, "bool").tensor

    def _kept_slots(self, work_item: BatchWork) -> NDArray[np.int64] | None:
        """The slots to deliver, neither dropped nor bad; None for all, since bad samples were replaced. Raises
        `StageError`."""
        failures, num_slots, policy = work_item.failures, len(work_item), self._shape.policy
        failures.sort(key=lambda failure: (failure.slot, failure.position))  # of one slot, in their order
        if failures and policy == "raise":
            raise failures[0].error
        bad = {failure.slot for failure in failures if failure.slot >= 0} if policy == "skip" else set()
        if len(bad) == num_slots:
            first = failures[0].error
            raise StageError(
                f"all {num_slots} samples of {work_item} were bad, so nothing is left to deliver; the first: {first}",
                stage=first.stage,
                epoch=work_item.epoch,
            ) from first.__cause__
        left_out = bad.union(work_item.dropped)
        if not left_out:
            return None
        return np.array([slot for slot in range(num_slots) if slot not in left_out], np.int64)


def _emptied(work_item: BatchWork, filters: str) -> StageError:
    """The error for a batch of which filters left nothing."""
    num_dropped, first = len(work_item.dropped), int(work_item.positions[0])
    others = "; the others were bad" if num_dropped < len(work_item) else ""
    return StageError(
        f"{filters} left nothing of the batch at position {first} of epoch {work_item.epoch}: it dropped {num_dropped} of "
        f"{len(work_item)} samples{others}. Use larger batches, leave such samples out of the source, or set `on_empty_batch: "
        "skip`, with which there is no len(loader): for one rank, and loops that need no length",
        stage=filters,
        epoch=work_item.epoch,
        position=first,
    )


def _stack_rows(rows: list[GpuDecoded]) -> torch.Tensor:
    """Rows as one tensor [n, ...]: their common tensor if they are all its rows in order, else a copy."""
    first = rows[0].tensor
    if len(first) == len(rows) and all(row.tensor is first and row.row == place for place, row in enumerate(rows)):
        return first
    stacked = torch.empty((len(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
    rows_by_tensor: dict[int, list[int]] = {}  # by id of the tensor
    for place, row in enumerate(rows):
        rows_by_tensor.setdefault(id(row.tensor), []).append(place)
    for group in rows_by_tensor.values():
        tensor = rows[group[0]].tensor.to(first.device)
        stacked[group] = tensor[[rows[place].row for place in group]]
    return stacked


def _bounds_of(starts: list[NDArray[np.int32]], length: int, slots: NDArray[np.int64] | None) -> torch.Tensor:
    """The starts of the parts of sequences laid end to end, and the end of the last part: int32 [parts + 1]. `slots`:
    the slots of these sequences, if some are left out."""
    if slots is not None:
        before = (slots - np.arange(len(slots))) * length  # the length of those left out
        starts = [begins - num for begins, num in zip(starts, before.astype(np.int32), strict=True)]
    return torch.from_numpy(np.concatenate([*starts, np.array([len(starts) * length], np.int32)]))
