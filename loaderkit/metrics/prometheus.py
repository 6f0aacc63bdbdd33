"""Writes metrics in the formats of Prometheus and OpenMetrics; the one module that needs prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from loaderkit.checkpoint.save_log import SAVES
from loaderkit.metrics.exported import ExportedLoader
from loaderkit.metrics.families import CHECKPOINT_FAMILIES, PREFIX, Family, Point, checkpoint_points, family_of


def written(loaders: Iterable[ExportedLoader], accept: str) -> tuple[bytes, str]:
    """The metrics of loaders and of this process's saves, and their content type, as the header `accept` asks for them."""
    encode, content_type = choose_encoder(accept)
    return encode(_Metrics(loaders)), content_type


class _Metrics(Collector):
    def __init__(self, loaders: Iterable[ExportedLoader]) -> None:
        self._loaders = loaders

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for loader in self._loaders:
            common = (loader.name, str(loader.rank))
            for point in loader.points():
                _add(families, point, family_of(point.name), ("pipeline", "rank"), common)
        for point in checkpoint_points(SAVES.totals):
            _add(families, point, CHECKPOINT_FAMILIES[point.name], (), ())
        yield from families.values()


def _add(
    families: dict[str, CounterMetricFamily | GaugeMetricFamily],
    point: Point,
    described: Family,
    names: tuple[str, ...],
    values: tuple[str, ...],
) -> None:
    family = families.get(point.name)
    if family is None:
        make = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
        family = make(PREFIX + point.name, described.help, labels=(*names, *described.labels))
        families[point.name] = family
    family.add_metric((*values, *point.labels), point.value)
