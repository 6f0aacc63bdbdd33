"""A pipeline described in Python, one method a stage; every method returns a new description.

Pipeline.files("data/train", label="parent").shuffle(seed=0).read().decode().resize(224).batch(64)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.kind_methods import KindMethods, plain
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.parsing import load_yaml, parse


class Pipeline(KindMethods):
    """An immutable description of a pipeline. There is a class method for each kind of source, which begins one, and a method
    for each kind of stage, which adds one; both take the arguments of the reference.

    Relative paths are relative to the working directory when the description is read (`config`, `to_yaml`, `build`).
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._description: dict[str, Any] = _copied(description)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Pipeline:
        """The pipeline of a YAML file. Raises ConfigError."""
        return cls.of(load_yaml(Path(path), overrides=overrides))

    @classmethod
    def of(cls, config: PipelineConfig) -> Pipeline:
        """The pipeline that a config describes."""
        pipeline = cls({})
        pipeline.__dict__["config"] = config
        return pipeline

    @cached_property
    def config(self) -> PipelineConfig:
        """The validated, frozen description. Raises ConfigError with all problems."""
        return parse(self._description, expand=False)

    def to_yaml(self, *, defaults: bool = False) -> str:
        """YAML text that `from_yaml` turns back into an equal pipeline. Paths in it are absolute."""
        return self.config.to_yaml(defaults=defaults)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pipeline) and self.config == other.config

    def __hash__(self) -> int:
        return hash(self.config.name)

    def __repr__(self) -> str:
        stages = ", ".join(stage.name for stage in self.config.stages)
        return f"Pipeline({self.config.name!r}: {self.config.source_kind} -> {stages})"

    def named(self, name: str) -> Pipeline:
        """The same under another name."""
        return self._with(name=name)

    def shuffle(
        self,
        mode: Literal["global", "block", "none"] | bool = "global",
        *,
        seed: int = 0,
        block: int | str | None = None,
        window: int | None = None,
        lanes: int | None = None,
    ) -> Pipeline:
        """The order: global (or True), block (with `block`, `window`, `lanes`), or none (or False), as for validation."""
        given = {"block": block, "window": window, "lanes": lanes}
        cut = {name: value for name, value in given.items() if value is not None}
        return self._with_section("order", shuffle=mode, seed=seed, **({"block": cut} if cut else {}))

    def epochs(self, num_epochs: int | None) -> Pipeline:
        """Stop after `num_epochs` epochs; None: never."""
        return self._with_section("order", epochs=num_epochs)

    def output(self, *fields: str | Sequence[str] | None) -> Pipeline:
        """Batches as tuples of these fields: `output("image", "label")`, or one list of them; `output(None)`: as dicts."""
        names = fields[0] if len(fields) == 1 and not isinstance(fields[0], str) else fields
        return self._with(**plain({"output": names}))

    def with_overrides(self, overrides: Mapping[str, Any]) -> Pipeline:
        """The same with single values replaced by dotted key ("stages.batch.size")."""
        return Pipeline.of(parse(self._raw(), overrides=overrides, expand=False))

    def _raw(self) -> dict[str, Any]:
        return dict(self._description or self.config.to_dict())

    def _with(self, **sections: Any) -> Pipeline:
        return Pipeline({**self._raw(), **sections})

    def _with_stage(self, stage: Any) -> Pipeline:
        return self._with(stages=[*self._raw()["stages"], stage])

    def _with_section(self, key: str, **settings: Any) -> Pipeline:
        return self._with(**{key: {**self._raw().get(key, {}), **settings}})


def to_config(
    pipeline: str | Path | Mapping[str, Any] | Pipeline, overrides: Mapping[str, Any] | None = None
) -> PipelineConfig:
    """The frozen, validated description of any of the ways to describe a pipeline. Raises ConfigError."""
    if isinstance(pipeline, Pipeline):
        return pipeline.with_overrides(overrides).config if overrides else pipeline.config
    if isinstance(pipeline, Mapping):
        return parse(pipeline, overrides=overrides)
    if isinstance(pipeline, (str, Path)):
        return load_yaml(Path(pipeline), overrides=overrides)
    raise ConfigError(f"a pipeline is a path, a dict or a loaderkit.Pipeline, not {type(pipeline).__name__}")


def _copied(value: Any) -> Any:
    """A copy of the containers, so that later changes by the caller do not reach the description; objects are shared."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value
