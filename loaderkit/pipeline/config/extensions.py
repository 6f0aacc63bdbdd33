"""The kinds that a pipeline uses and loaderkit does not bring, for `check`, `explain` and worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from loaderkit._internal.extensions import Entry, Registry
from loaderkit.connectors.factory import CONNECTORS, scheme_of
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import SOURCES, STAGES


class Extension(NamedTuple):
    """A name that a pipeline uses, and the package or the module that brings it."""

    what: str  # stage, kind of source, connector
    name: str
    origin: str


class Kinds(NamedTuple):
    """Kinds of sources and stages, for a worker process: those that the program registered, and the names that packages have to
    bring there as well."""

    sources: dict[str, Entry[Any]]
    stages: dict[str, Entry[Any]]
    of_packages: tuple[Extension, ...]

    @property
    def registered(self) -> dict[str, Any]:
        """By name, what the program registered."""
        return {name: entry.item for name, entry in {**self.sources, **self.stages}.items()}

    def adopt(self) -> None:
        """Register them in this process. Raises ConfigError for a kind whose package is not installed here."""
        SOURCES.adopt(self.sources)
        STAGES.adopt(self.stages)
        for extension in self.of_packages:
            registry: Registry[Any] = SOURCES if extension.what == SOURCES.noun else STAGES
            if extension.name not in registry:
                raise ConfigError(
                    f"the {extension.what} {extension.name!r} is not known where batches are made: the package "
                    f"{extension.origin} brings it in the process that trains; install it there, too"
                )


def used_extensions(config: PipelineConfig, *, all_claims: bool = False) -> list[Extension]:
    """The kinds that the pipeline uses and loaderkit does not bring; connectors only if `build` was not given another
    one for their scheme. Raises ConfigError; with `all_claims` also if a package claims a name of ours that the
    pipeline uses."""
    used: dict[Extension, None] = {}
    for registry, name in _names(config):
        if all_claims and registry.is_ours(name):
            registry.check_unclaimed(name)
        if name in registry and not registry.is_ours(name):
            used[Extension(registry.noun, name, registry.entry(name).origin)] = None
    return list(used)


def kinds_for_workers(config: PipelineConfig) -> Kinds | None:
    """What worker processes have to know; None if the pipeline uses only kinds of loaderkit."""
    used = [extension for extension in used_extensions(config) if extension.what != CONNECTORS.noun]
    if not used:
        return None
    of_sources, of_stages = SOURCES.registered(), STAGES.registered()
    sources = {one.name: of_sources[one.name] for one in used if one.what == SOURCES.noun and one.name in of_sources}
    stages = {one.name: of_stages[one.name] for one in used if one.what == STAGES.noun and one.name in of_stages}
    return Kinds(sources, stages, tuple(one for one in used if one.name not in {**sources, **stages}))


def _names(config: PipelineConfig) -> Iterator[tuple[Registry[Any], str]]:
    """Each name that the pipeline uses, and where it is to be looked up."""
    members = [config.source] if config.mixture is None else [member.args for member in config.mixture.members]
    for args in members:
        yield SOURCES, args.kind
        root = SOURCES[args.kind].root
        if root is not None:
            yield CONNECTORS, scheme_of(root(args))
    yield from ((STAGES, stage.kind) for stage in config.all_stages)
