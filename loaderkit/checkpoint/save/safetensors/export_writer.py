"""`ExportWriter`: writes what `ExportRule` makes of a state, as `StreamWriter` writes the state."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from loaderkit.checkpoint.formats.state_file import STATE, read_state
from loaderkit.checkpoint.save.dcp_writer import StreamWriter
from loaderkit.checkpoint.save.placement import read_object
from loaderkit.checkpoint.save.safetensors.export import ExportRule
from loaderkit.checkpoint.save.safetensors.writer import SafetensorsSave
from loaderkit.errors import CheckpointError, ObjectNotFoundError


class ExportWriter(StreamWriter):
    """A StreamWriter that writes an export. An export has its own variant of safetensors, which `restore` refuses
    unless asked for it."""

    def __init__(self, url: str, rule: ExportRule, **settings: Any) -> None:
        super().__init__(url, format="safetensors", **settings)
        self._rule = rule
        self._last: SafetensorsSave | None = None

    @property
    def report(self) -> dict[str, Any]:
        """On the coordinator: bytes of the last export and of what it was made of, relative error, and the tensor with the
        worst."""
        return {} if self._last is None else self._last.report

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raises CheckpointError rather than replace an existing checkpoint by rounded numbers."""
        target = self._opened()
        with suppress(ObjectNotFoundError):
            if not read_state(read_object(target.connector, target.prefix + STATE)).export:
                raise CheckpointError(f"{target.url} is a checkpoint, no export: give the copy a directory of its own")
        return super().prepare_global_plan(plans)

    def _new_save(self, plan: SavePlan, is_alone: bool | None) -> SafetensorsSave:
        self._last = SafetensorsSave(plan, is_alone=is_alone, rule=self._rule)
        return self._last
