"""Objects by name: any module that Python can import, dashes included."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderkit._internal.imports import import_named


def test_modules_whose_names_are_no_identifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "01-data.py").write_text("class Shapes:\n    num_sides = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_named("01-data:Shapes.num_sides") == 4
    assert import_named("os.path:join")("a", "b") == "a/b"
    with pytest.raises(AttributeError):
        import_named("01-data:Circle")
    with pytest.raises(ModuleNotFoundError):
        import_named("02-data:Shapes")
