"""The contract of stages: their common arguments, and a stage as the config of a pipeline has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field, PositiveInt

from loaderkit._internal.config.settings import Model, as_tuple
from loaderkit.engine.work import Stage


class StageArgs(Model):
    """The arguments of every stage."""

    name: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[A-Za-z_][\w-]*$",
        description="default: its kind; a second stage of a kind is kind-2",
    )
    workers: PositiveInt | Literal["auto"] = Field(
        "auto", description="dedicated threads, or auto: share the automatic pool with adjacent stages"
    )


FieldNames = Annotated[
    Annotated[tuple[str, ...], Field(min_length=1)] | None,
    BeforeValidator(as_tuple),
]
"""The fields a stage acts on, or None for all fields of the right type."""


@dataclass(frozen=True)
class StageConfig:
    """One stage: its kind, its name (unique in the pipeline) and its arguments."""

    kind: str
    name: str
    args: StageArgs

    def ready(
        self,
        scope: Literal["sample", "batch"],
        run: Callable[..., Any],
        *,
        close: Callable[[], None] | None = None,
        interrupt: Callable[[], None] | None = None,
        waits_for: Callable[[int], str | None] = lambda thread_id: None,
        finishes: bool = False,
        in_turn: bool = False,
        content: str = "",
        owner: Any = None,
    ) -> Stage:
        """The stage, ready to run."""
        workers = None if self.args.workers == "auto" else self.args.workers
        return Stage(
            self.name,
            self.kind,
            scope,
            run,
            workers=workers,
            close=close,
            interrupt=interrupt,
            waits_for=waits_for,
            finishes=finishes,
            in_turn=in_turn,
            content=content,
            owner=owner,
        )


class AddError(Protocol):
    """Reports a problem of the stage at index `number`, or of one of its arguments."""

    def __call__(self, number: int, message: str, argument: str | None = None) -> None: ...


Scope = Literal["sample", "boundary", "batch", "either"]
