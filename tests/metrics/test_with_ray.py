"""A scrape of a loader whose workers are actors."""

from __future__ import annotations

import pytest
from ray_nodes import Nodes, build_ray
from scraping import Scrape, free_port

from loaderkit import Pipeline


@pytest.mark.integration
@pytest.mark.prove
def test_there_are_rows_of_nodes(ray_nodes: Nodes) -> None:
    port = free_port()
    pipeline = Pipeline.dataset(list(range(96))).read().batch(8).epochs(1).metrics(prometheus=port)
    with build_ray(pipeline) as loader:
        assert len(list(loader)) == 12
        scrape, rows = Scrape(port), loader.stats().nodes.rows
    assert scrape("batches_total") == 12
    assert scrape.by("node", "node_batches_total") == {row.name: row.num_batches for row in rows}
    assert scrape("node_workers") == scrape("processes") == 2
