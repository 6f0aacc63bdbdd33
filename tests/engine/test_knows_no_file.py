"""The engine names no key of a pipeline's file and no kind of stage: those who know them read its facts."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import loaderkit
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.config.registry import STAGES

ENGINE = Path(loaderkit.__file__).parent / "engine"
SECTIONS = [*PipelineConfig.__dataclass_fields__]
KEY = re.compile(rf"\b(?:{'|'.join(SECTIONS)})\.[a-z_]+|\b(?:{'|'.join(SECTIONS)}): \{{")


def named(source: str) -> Iterator[str]:
    """The keys in texts that are no docstrings, and the names of kinds that a `kind` is compared with."""
    tree = ast.parse(source)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield from KEY.findall(node.value)
        elif isinstance(node, ast.Compare) and any(
            isinstance(part, ast.Attribute) and part.attr == "kind" for part in (node.left, *node.comparators)
        ):
            texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str) and text in STAGES)


@pytest.mark.parametrize("path", sorted(ENGINE.rglob("*.py")), ids=lambda path: str(path.relative_to(ENGINE)))
def test_no_key_and_no_kind(path: Path) -> None:
    assert not [*named(path.read_text())]


def test_the_search_itself_can_fail(rng: random.Random) -> None:
    section, kind = rng.choice(SECTIONS), rng.choice([*STAGES])
    assert [*named(f'"""Of {section}.size."""\nraise ValueError(f"make {section}.size smaller than {{x}}")')]
    assert [*named(f'text = "set {section}: {{share: read}}"')]
    assert [*named(f'if stage.kind == "{kind}":\n    pass')]
    assert [*named(f'found = [row for row in rows if row.kind in ("{kind}", "other")]')]
    assert not [*named(f'"""Of {section}.size, and {kind}."""\nstage.{kind} = "{kind}"')]
