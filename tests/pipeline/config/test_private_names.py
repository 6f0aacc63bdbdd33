"""Attributes of `Pipeline` that copy, pickle, inspect and test runners ask for are looked for nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from loaderkit import Pipeline


def test_private_names_ask_for_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("loaderkit._internal.extensions.entry_points", lambda **group: asked.append(group) or [])
    pipeline = Pipeline.files("data")
    for owner in (Pipeline, pipeline):
        with pytest.raises(AttributeError, match=r"'Pipeline' has no attribute '_nothing'"):
            owner._nothing  # noqa: B018
        assert not hasattr(owner, "__wrapped__")
    assert asked == []
    with pytest.raises(AttributeError, match="nothing"):
        Pipeline.nothing  # noqa: B018
    assert asked != []
