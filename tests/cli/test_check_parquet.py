"""`loaderkit check` of a source of row groups: how often an epoch decodes each, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loaderkit import Pipeline
from loaderkit.cli import main


def checked(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    sets = [part for argument in arguments for part in ("--set", argument)]
    assert main(["check", str(path), "--json", *sets]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["check", str(path), *sets]) == 0
    return facts["row_groups"], capsys.readouterr().out


def test_how_often_row_groups_are_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a count by hand: of 20 row groups memory holds 4."""
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(2000)}), tmp_path / "t.parquet", row_group_size=100)
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text(Pipeline.parquet(str(tmp_path / "t.parquet")).shuffle(seed=1).read().batch(8).to_yaml())
    facts, said = checked(pipeline, capsys)
    assert (facts["num"], facts["decoded_share"]) == (20, 1)
    assert "20 row groups" in said
    assert "times" not in said
    few = f"source.memory={4 * facts['mean_bytes'] + 100}"
    facts, said = checked(pipeline, capsys, few)
    assert 70 < facts["decoded_share"] < 90, "4 of 5 rows find their row group gone: 80 rows a row group"
    assert "set `order: {shuffle: block}`" in said
    facts, said = checked(pipeline, capsys, few, "order.shuffle=block", "order.block={block: 1, window: 2, lanes: 2}")
    assert facts["decoded_share"] < 1.5
    assert "times" not in said
    facts, said = checked(pipeline, capsys, few, "order.shuffle=block", "order.block={block: 1, window: 8, lanes: 2}")
    assert facts["decoded_share"] > 10
    assert "make `window` or `lanes` of `order.block` smaller" in said
    facts, _ = checked(pipeline, capsys, few, "order.shuffle=none")
    assert facts["decoded_share"] == 1
