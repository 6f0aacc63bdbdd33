"""`ExportWriter`: writes what `ExportRule` makes of a state, as `StreamWriter` writes the state."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from loaderkit.checkpoint.save.dcp_writer import StreamWriter
from loaderkit.checkpoint.save.safetensors.export import ExportRule
from loaderkit.checkpoint.save.safetensors.writer import SafetensorsSave


class ExportWriter(StreamWriter):
    """A StreamWriter that writes an export: an own format of safetensors, which `restore` refuses unless it is asked for."""

    def __init__(self, url: str, rule: ExportRule, **settings: Any) -> None:
        super().__init__(url, format="safetensors", **settings)
        self._rule = rule
        self._last: SafetensorsSave | None = None

    @property
    def report(self) -> dict[str, Any]:
        """On the coordinator: bytes of the last export and of what it was made of, relative error, and the tensor with the
        worst."""
        return {} if self._last is None else self._last.report

    def _new_save(self, plan: SavePlan, is_alone: bool | None) -> SafetensorsSave:
        self._last = SafetensorsSave(plan, is_alone=is_alone, rule=self._rule)
        return self._last
