"""Descriptions for the tests of the configuration, and what they name."""

from __future__ import annotations

from typing import Any

MINIMAL = """\
source: {kind: files, url: data}
stages: [read, batch: {size: 4}]
"""


def double(sample: dict[str, Any], factor: int = 2) -> dict[str, Any]:
    """A function that YAML can name."""
    return sample


class Letters:
    """A data set object."""

    def __init__(self, num: int = 5) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index}
