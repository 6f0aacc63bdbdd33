"""The dashboard and the recipe ask for what there is, and a real Prometheus agrees."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from doc_examples import named
from scraping import free_port
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.metrics.families import CHECKPOINT_FAMILIES, FAMILIES, PREFIX, Family, family_of, store_name

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text())
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def known() -> dict[str, Family]:
    """All metrics by their names in queries; of the connectors' counters those that the reference lists."""
    listed = (DOCS / "reference.md").read_text().partition("In `store`, as far as")[2].partition("Stages that share")[0]
    store = {store_name(key) for key in re.findall(r"`(\w+)`", listed)}
    families = FAMILIES | {name: family_of(name) for name in store} | CHECKPOINT_FAMILIES
    return {
        f"{PREFIX}{name}{'_total' if family.kind == 'counter' else ''}": family for name, family in families.items()
    }


def metrics_in(query: str) -> list[str]:
    return re.findall(r"\bloaderkit_\w+", query)


@pytest.mark.parametrize(("title", "target"), TARGETS)
def test_queries_are_of_metrics_and_labels_that_exist(title: str, target: dict[str, Any]) -> None:
    query, families = target["expr"], known()
    names = metrics_in(query)
    assert names, title
    for name in names:
        family = families[name]
        own = (
            {"pipeline", "rank"}
            if name.removeprefix(PREFIX).removesuffix("_total") not in CHECKPOINT_FAMILIES
            else set()
        )
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        assert grouped <= own | {*family.labels}
        assert {*re.findall(r"(\w+)=~", query)} <= own
        assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} <= grouped
        assert ("rate(" in query or "increase(" in query) == (family.kind == "counter")


def test_the_variables_of_the_dashboard() -> None:
    queries = [
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    ]
    assert len(queries) == 2
    for query in queries:
        assert [name in known() for name in metrics_in(query)] == [True]


def test_the_dashboard_shows_every_counter_of_the_loop() -> None:
    shown = {name for _, target in TARGETS for name in metrics_in(target["expr"])}
    assert {f"loaderkit_{name}_total" for name in ("stall_seconds", "batches", "samples", "bad_samples")} <= shown


@pytest.mark.integration
def test_its_queries_are_valid(tmp_path: Path) -> None:
    rules = [
        {"record": f"query_{number}", "expr": target["expr"].replace("$__rate_interval", "1m")}
        for number, (_, target) in enumerate(TARGETS)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(to_yaml({"groups": [{"name": "dashboard", "rules": rules}]}, width=1000))
    ran = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.integration
def test_a_real_prometheus_scrapes_by_the_recipe(tmp_path: Path) -> None:
    """Its answer to the dashboard's own queries, and to the number of batches."""
    port, own_port = free_port(), free_port()
    text = named("docs/guide/metrics.md", "prometheus.yml")
    assert text.count(":9431") == 1
    (tmp_path / "prometheus.yml").write_text(
        re.sub(r"\[trainer-0:9431.*\]", f"['127.0.0.1:{port}']", text).replace("15s", "100ms")
    )
    pipeline = Pipeline.dataset(list(range(40))).read().batch(5).named("train").metrics(prometheus=port)
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]  # Debian's has one place for all, otherwise
    command = ["prometheus", *options, f"--web.listen-address=127.0.0.1:{own_port}"]

    def ask(query: str) -> list[Any]:
        url = f"http://127.0.0.1:{own_port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
        return found

    def delivered() -> list[str]:
        try:
            return [sample["value"][1] for sample in ask('loaderkit_batches_total{pipeline="train",rank="0"}')]
        except OSError:  # it is starting
            return []

    with loaderkit.build(pipeline) as loader, subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as ran:
        try:
            list(loader)
            wait_for(lambda: delivered() == ["8"])
            wait_for(lambda: ask("rate(loaderkit_stall_seconds_total[1m])") != [])
            assert ask("up")[0]["value"][1] == "1"
        finally:
            ran.kill()
