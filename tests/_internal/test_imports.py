"""Objects by name: any module that Python can import, dashes included."""

from __future__ import annotations

import subprocess
import sys
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


def test_where_a_module_was_looked_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needs_another.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'") as caught:
        import_named("nowhere.clicks:split")
    assert f"in the working directory, {tmp_path}," in str(caught.value)
    assert "script's own folder" in str(caught.value)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'nowhere_at_all'$"):
        import_named("needs_another:split")


def test_the_working_directory_is_looked_into_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("first", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both_have_it.py").write_text(f"place = {folder!r}\n")
    (tmp_path / "here" / "only_here.py").write_text("place = 'here'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), *(folder for folder in sys.path if folder)])
    monkeypatch.chdir(tmp_path / "here")
    assert import_named("both_have_it:place") == "first"
    assert import_named("only_here:place") == "here"


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_a_script_that_names_itself_is_told_so(tmp_path: Path, executor: str) -> None:
    """It would be run by its own import, and by each loading process, which would start others, and so on."""
    text = f"""
import loaderkit

class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {{"x": index}}

pipeline = loaderkit.Pipeline.dataset("numbered:Numbers").read().batch(4).prefetch(executor="{executor}").epochs(1)
loader = loaderkit.build(pipeline)
print(len(list(loader)))
loader.close()
"""
    begin, end = text.index("print("), len(text)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "numbered.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    (tmp_path / "numbered.py").write_text(text)
    ran = run()
    assert (ran.returncode, ran.stdout) == (1, "")
    assert 'put what runs there under `if __name__ == "__main__":`, or Numbers in a module of its own' in ran.stderr
    # A loader at the top level is none that begins: also the loading processes make one, and leave it alone.
    indented = "".join(f"    {line}\n" for line in text[begin:end].splitlines())
    (tmp_path / "numbered.py").write_text(f"{text[:begin]}if __name__ == '__main__':\n{indented}")
    ran = run()
    assert (ran.returncode, ran.stdout) == (0, "2\n"), ran.stderr
