"""Reads the metrics of a loader, as Prometheus does."""

from __future__ import annotations

import socket
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

OPENMETRICS = "application/openmetrics-text;version=1.0.0"

Key = tuple[str, frozenset[tuple[str, str]]]


def free_port() -> int:
    """A port at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def text_of(port: int, accept: str = OPENMETRICS, host: str = "127.0.0.1") -> str:
    """What the endpoint answers."""
    request = urllib.request.Request(f"http://{host}:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert ("openmetrics" in answer.headers["Content-Type"]) == (accept == OPENMETRICS)
        text: str = answer.read().decode()
    return text


class Scrape:
    """The values of one scrape; it must be valid OpenMetrics, and without a sample that stands there twice."""

    def __init__(self, port: int, *, plain: bool = False) -> None:
        parse, accept = (parse_plain, "text/plain") if plain else (parse_openmetrics, OPENMETRICS)
        families = list(parse(text_of(port, accept)))
        assert all(family.name.startswith("loaderkit_") and family.documentation for family in families)
        self.kinds = {sample.name: family.type for family in families for sample in family.samples}
        samples = [
            (sample.name, frozenset(sample.labels.items()), sample.value)
            for family in families
            for sample in family.samples
        ]
        self.values: dict[Key, float] = {(name, labels): value for name, labels, value in samples}
        assert len(self.values) == len(samples)

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of a metric over all combinations of labels with these."""
        found = [
            value
            for (one, its), value in self.values.items()
            if one == f"loaderkit_{name}" and its >= set(labels.items())
        ]
        assert found, (name, labels)
        return sum(found)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The values of a metric by one of its labels."""
        return {
            dict(its)[label]: value
            for (one, its), value in self.values.items()
            if one == f"loaderkit_{name}" and its >= set(labels.items())
        }

    @property
    def counters(self) -> dict[Key, float]:
        """The values that may never go back."""
        return {key: value for key, value in self.values.items() if self.kinds[key[0]] == "counter"}
