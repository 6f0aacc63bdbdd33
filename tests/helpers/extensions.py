"""What tests register, and its end."""

from __future__ import annotations

from typing import Any

import pytest

from loaderkit._internal.extensions import Registry
from loaderkit.connectors.factory import CONNECTORS
from loaderkit.pipeline.config.registry import SOURCES, STAGES


def forget_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, after the test, what it registers, and which entry points were looked up."""
    registries: tuple[Registry[Any], ...] = (SOURCES, STAGES, CONNECTORS)
    for registry in registries:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_resolved", {})
