"""Names of files that are not what they look like: brackets, Unicode forms, globs; and files that belong together or lack."""

from __future__ import annotations

import io
import logging
import random
import tarfile
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, LoaderkitError, SourceError

INLINE = {"prefetch.executor": "inline"}
BOM = b"\xef\xbb\xbf"


def first(made: Pipeline, size: int = 1) -> dict[str, Any]:
    with loaderkit.build(made.shuffle(False).read().decode().batch(size), overrides=INLINE) as loader:
        batch: dict[str, Any] = next(iter(loader))
        return batch


def test_an_exact_name_wins_over_a_glob(tmp_path: Path, rng: random.Random) -> None:
    name = f"c4[{rng.choice(['en', 'a-c', '!x'])}].jsonl"
    for number, other in enumerate((name, "c4e.jsonl", "c4b.jsonl")):
        (tmp_path / other).write_text(f'{{"x": {number}}}\n')
    with loaderkit.build(Pipeline.lines(str(tmp_path / name)).read().batch(5), overrides=INLINE) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[0]]
    (tmp_path / name).unlink()
    with loaderkit.build(Pipeline.lines(str(tmp_path / name)).read().batch(5), overrides=INLINE) as loader:
        assert 0 not in next(iter(loader))["x"].tolist()
    folder = tmp_path / "[x]*"
    folder.mkdir()
    (folder / "a.txt").write_text("here")
    assert first(Pipeline.files(str(folder), include="*.txt"))["txt"] == ["here"]


def test_another_unicode_form_is_named(tmp_path: Path) -> None:
    composed = "Käse-é"
    spelt = {form: normalize(form, composed) for form in ("NFC", "NFD")}
    for there, wanted in (("NFD", "NFC"), ("NFC", "NFD")):
        folder = tmp_path / there
        (folder / "images").mkdir(parents=True)
        (folder / "labels").mkdir()
        (folder / f"{spelt[there]}.jsonl").write_text("1\n")
        with pytest.raises(SourceError, match=f"the same name in another Unicode form, {there}"):
            loaderkit.build(Pipeline.lines(str(folder / f"{spelt[wanted]}.jsonl")).read().batch(1))
        (folder / "images" / f"{spelt[there]}.txt").write_text("1")
        (folder / "labels" / f"{spelt[wanted]}.txt").write_text("1")
        fields = {"image": "images/*.txt", "label": "labels/*.txt"}
        with pytest.raises(SourceError, match="another Unicode form"):
            loaderkit.build(Pipeline.files(str(folder), fields=fields).read().batch(1))


def test_a_glob_in_the_url_of_files(tmp_path: Path, rng: random.Random) -> None:
    names = {f"{rng.choice('ab')}/{n}.{rng.choice(['txt', 'md'])}" for n in range(30)} | {"a/x.txt"}
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    batch = first(Pipeline.files(f"{tmp_path}/a/*.txt"), 99)
    assert batch["__key__"] == sorted(name[2:] for name in names if name.startswith("a/") and name.endswith("txt"))
    with pytest.raises(ConfigError, match="give the folder in `url`"):
        first(Pipeline.files(f"{tmp_path}/*/*.txt", include="*"))


@pytest.mark.parametrize("include", ["**/*.jpg", "*.jpg", "*"])
def test_a_glob_without_quotes_in_yaml(include: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"source: {{kind: files, url: x, include: {include}}}\nstages: [read, {{batch: {{size: 1}}}}]\n")
    with pytest.raises(ConfigError, match="put in quotes"):
        loaderkit.build(path)


def test_pairs_by_extension_say_how_they_are_written(tmp_path: Path) -> None:
    for name in ("1.txt", "1.md", "2.md"):
        (tmp_path / name).write_text(name)
    made = Pipeline.files(str(tmp_path), include="*", fields={"text": "txt", "note": "md"})
    with pytest.raises(SourceError, match=r"note: '\*\*/\*.md', text: '\*\*/\*.txt'"):
        first(made)


def test_a_missing_file_is_empty_on_request(tmp_path: Path, rng: random.Random) -> None:
    texts = {f"{n:03}": f"label {n}" * (rng.random() < 0.5) for n in range(20)} | {"000": "", "001": "x"}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for stem, text in texts.items():
            for folder, extension, data in (("pictures", "bin", b"p"), ("labels", "txt", text.encode())):
                if not data:
                    continue
                (tmp_path / folder).mkdir(exist_ok=True)
                (tmp_path / folder / f"{stem}.{extension}").write_bytes(data)
                info = tarfile.TarInfo(f"{stem}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    patterns, extensions = {"image": "pictures/*.bin", "label": "labels/*.txt"}, {"image": "bin", "label": "txt"}
    for made, where in (
        (partial(Pipeline.files, str(tmp_path), fields=patterns), "of files"),
        (partial(Pipeline.tar, str(tmp_path / "a.tar"), fields=extensions), "of tars"),
    ):
        batch = first(made(optional=["label"]), 20)
        assert batch["label"] == [*texts.values()], where
        assert batch["image"] == [b"p"] * 20
        with pytest.raises(LoaderkitError, match="'label'"):
            first(made(), 20)


def test_a_byte_order_mark_belongs_to_no_text(tmp_path: Path) -> None:
    contents = {"text": "é\n", "json": '{"x": 1}', "cls": "7"}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for extension, text in contents.items():
            info = tarfile.TarInfo(f"a.{extension}")
            data = BOM + text.encode()
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    batch = first(Pipeline.tar(str(tmp_path / "a.tar")))
    assert (batch["text"], batch["json"], batch["label"].tolist()) == (["é\n"], [{"x": 1}], [7])


def test_a_decode_that_decodes_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    caplog.set_level(logging.WARNING, "loaderkit")
    first(Pipeline.files(str(tmp_path), include="*.bin"))
    first(Pipeline.dataset([{"x": b"\0\1", "label": 3}]))
    assert caplog.text.count("decodes nothing") == 2
    caplog.clear()
    (tmp_path / "a.txt").write_text("text")
    first(Pipeline.files(str(tmp_path), include="*.txt"))
    assert "decodes nothing" not in caplog.text
