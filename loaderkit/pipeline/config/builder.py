"""Describes a pipeline in Python, one method for each stage; every method returns a new description.

Pipeline.files("data/train", label="parent").shuffle(seed=0).read().decode().resize(224).batch(64)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from loaderkit._internal.config.diagnostics import nearest
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.kind_methods import KindMethods, plain
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.parsing import copied, load_yaml, parse


class Pipeline(KindMethods):
    """An immutable description of a pipeline. There is a class method for each kind of source, which begins one, and a method
    for each kind of stage, which adds one; both take the arguments of the reference.

    Relative paths are relative to the working directory when the description is read (`config`, `to_yaml`, `build`).
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        if not isinstance(description, Mapping):  # a data set of samples by number may have no end to copy
            raise ConfigError(
                f"Pipeline takes what a file says, as a dict, not {type(description).__name__}: begin with the kind of source, "
                "as in Pipeline.files(...), or Pipeline.dataset(...) for objects of yours"
            )
        self._description: dict[str, Any] = copied(description)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Pipeline:
        """The pipeline of a YAML file. Raises ConfigError."""
        return cls.of(load_yaml(Path(path), overrides=overrides))

    @classmethod
    def mix(
        cls,
        sources: Mapping[str, Pipeline],
        weights: Mapping[str, float] | None = None,
        *,
        by: Literal["sample", "tokens"] = "sample",
        stop: Literal["first", "all", "never"] = "first",
        epochs: Mapping[str, int] | None = None,
        repeat: Sequence[str] = (),
        changes: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> Pipeline:
        """Several sources as one, by name. Each is a pipeline begun by `Pipeline.files(...)` or the like, without
        `read`; its stages are for that source alone.

        `weights` are the shares of samples or of tokens, equal by default, and `changes` other ones from positions of the epoch
        on, counted in samples. An epoch `stop`s when the first source is used up, or all are, or never. A source is used up
        after its `epochs` passes (1), those in `repeat` never.
        """
        entries = []
        for name, pipeline in sources.items():
            described = pipeline._raw()
            if "source" not in described:
                raise ConfigError(f"mix: {name!r} is a mixture itself: mix its sources instead")
            if more := described.keys() - {"version", "name", "source", "stages"}:
                raise ConfigError(
                    f"mix: {name!r} has settings of its own ({', '.join(sorted(more))}): give them to the mixture"
                )
            entry = {"name": name, **described["source"], "weight": 1.0 if weights is None else weights.get(name)}
            entry |= {"epochs": epochs[name]} if epochs is not None and name in epochs else {}
            entry |= {"repeat": True} if name in repeat else {}
            entries.append(entry | ({"stages": described["stages"]} if described["stages"] else {}))
        for what, names in (("weights", weights or {}), ("epochs", epochs or {}), ("repeat", repeat)):
            if unknown := [name for name in names if name not in sources]:
                raise ConfigError(f"mix: {what} names {unknown[0]!r}; {nearest(unknown[0], sources)}")
        if missing := [entry["name"] for entry in entries if entry["weight"] is None]:
            raise ConfigError(f"mix: weights names not every source: {', '.join(missing)} is missing; 0 for none yet")
        mix = {"by": by, "stop": stop, "changes": [{"at": at, "weights": dict(later)} for at, later in changes]}
        return cls({"sources": entries, "mix": mix, "stages": []})

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
        weights: Literal["by class"] | Mapping[str, float] | None = None,
    ) -> Pipeline:
        """The order: global (or True), block (with `block`, `window`, `lanes`), or none (or False), as for validation.

        `weights`: by class, or class -> weight: samples are drawn with replacement, and every class as often as its
        weight says.
        """
        given = {"block": block, "window": window, "lanes": lanes}
        cut = {name: value for name, value in given.items() if value is not None}
        drawn = {} if weights is None else {"weights": weights if isinstance(weights, str) else dict(weights)}
        return self._with_section("order", shuffle=mode, seed=seed, **({"block": cut} if cut else {}), **drawn)

    def epochs(self, num_epochs: int | None) -> Pipeline:
        """Stop after `num_epochs` epochs; None means never."""
        return self._with_section("order", epochs=num_epochs)

    def output(self, *fields: str | Sequence[str] | None) -> Pipeline:
        """Batches as tuples of these fields: `output("image", "label")`, or one list of them; `output(None)`: as dicts."""
        names = fields[0] if len(fields) == 1 and not isinstance(fields[0], str) else fields
        return self._with(**plain({"output": names}))

    def with_overrides(self, overrides: Mapping[str, Any]) -> Pipeline:
        """The same pipeline with single values replaced by dotted key ("stages.batch.size")."""
        return Pipeline.of(parse(self._raw(), overrides=overrides, expand=False))

    def _raw(self) -> dict[str, Any]:
        return dict(self._description or self.config.to_dict())

    def _with(self, **sections: Any) -> Pipeline:
        return Pipeline({**self._raw(), **sections})

    def _with_stage(self, stage: Any) -> Pipeline:
        return self._with(stages=[*self._raw().get("stages", ()), stage])

    def _with_section(self, key: str, **settings: Any) -> Pipeline:
        return self._with(**{key: {**self._raw().get(key, {}), **settings}})


def to_config(
    pipeline: str | Path | Mapping[str, Any] | Pipeline, overrides: Mapping[str, Any] | None = None
) -> PipelineConfig:
    """The frozen, validated description of a pipeline that is given in any of the possible ways. Raises ConfigError."""
    if isinstance(pipeline, Pipeline):
        return pipeline.with_overrides(overrides).config if overrides else pipeline.config
    if isinstance(pipeline, Mapping):
        return parse(pipeline, overrides=overrides)
    if isinstance(pipeline, (str, Path)):
        return load_yaml(Path(pipeline), overrides=overrides)
    raise ConfigError(f"a pipeline is a path, a dict or a loaderkit.Pipeline, not {type(pipeline).__name__}")
