"""Names that data bring along are text wherever they are shown: no markup, no order to a terminal."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from conftest import make_photo
from rich.text import Text
from safetensors.torch import save_file

from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.checkpoint import latest
from loaderkit.cli import main
from loaderkit.cli.terminal import console
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import CheckpointError, FormatError, LoaderkitError, StageError, printable
from loaderkit.profile.render.summary import PlainConsole, table_of
from loaderkit.sources.formats.tar_index import load_index

ORDERS = ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x08\x08", "\r", "\x7f", "\u202egpj", "\u2028", "\udcff"]
MARKUP = ["[red]", "[/]", "[/red]", "[link=http://x]", "[bold", ":smile:", "{x}", "%s", "<b>", "\\["]
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def nasty(rng: random.Random) -> str:
    """A file's name without its extension; dots would end a tar's key."""
    parts = [*rng.sample(ORDERS, 3), *rng.sample(MARKUP, 3), "name"]
    rng.shuffle(parts)
    return "".join(parts).replace("/", "|")  # "[/" needs a folder


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def names(rng: random.Random, num: int) -> list[str]:
    return sorted({nasty(rng) for _ in range(num)})


def pipeline(folder: Path, **source: object) -> Path:
    path = folder.parent / "p.yaml"
    described = {
        "source": {"url": str(folder), **source},
        "stages": ["read", "decode", {"center_crop": {"size": 16}}, {"batch": {"size": 4}}],
        "order": {"shuffle": "none"},
        "errors": {"on_bad_sample": "skip", "max_bad_samples": 100, "quarantine": str(folder.parent / "bad.jsonl")},
    }
    path.write_text(to_yaml(described))
    return path


def test_printable(rng: random.Random) -> None:
    for _ in range(200):
        text = nasty(rng) + "\n\tplain é 漢"
        shown = printable(text)
        assert not OBEYED.search(shown)
        assert shown.endswith("\n\tplain é 漢")
        assert printable(shown) == shown
        assert str(FormatError(text)) == shown
        copy = pickle.loads(pickle.dumps(StageError(text, key=text)))
        assert (str(copy), copy.key) == (shown, text)  # the key is what the sample is called
    assert printable("a\x1b[2Jb\\x1b") == "a\\x1b[2Jb\\x1b"


def test_no_message_has_a_password(rng: random.Random) -> None:
    secret = "".join(rng.choices("abcXYZ019@:%!", k=12))
    for url in (f"sftp://me:{secret}@host/data/a@b.tar", f"https://:{secret}@host:80", f"ftp://me:{secret}@host\nnext"):
        said = str(LoaderkitError(f"nothing below '{url}'"))
        assert secret not in said
        assert said == f"nothing below '{url}'".replace(secret, "***")
    for plain in ("s3://bucket/a:b@c", "a@b.c", "file:///x:1@2", "http://host:80/x@y"):
        assert printable(plain) == plain


def test_tables_and_texts(rng: random.Random) -> None:
    for _ in range(50):
        name = nasty(rng)
        table = table_of("sample", "took")
        table.add_row(name, "1 s")
        file = io.StringIO()
        screen = PlainConsole(file=file, width=500, force_terminal=True)
        screen.print(table)
        screen.print(Text(name))
        screen.print(name)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()[1:]  # what Rich makes bold itself
        assert [lines[0].removesuffix("1 s").rstrip(), lines[2]] == [printable(name)] * 2
        assert not OBEYED.search(lines[1])  # of some characters `Text` lets go by itself


@pytest.mark.parametrize("command", ["check", "run", "index", "restore"])
def test_commands(
    command: str,
    rng: random.Random,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Files, classes, members, tensors and bad samples of such names."""
    folder = tmp_path / "data"
    for label in names(rng, 2):
        (folder / label).mkdir(parents=True)
        for number, name in enumerate(names(rng, 4)):
            (folder / label / f"{name}.jpg").write_bytes(make_photo(number)[: None if number else 50])
    path = pipeline(folder, kind="files", include="**/*.jpg", label="parent")
    if command == "check":
        assert main(["check", str(path)]) == 0
    elif command == "run":
        assert main(["run", str(path)]) == 0
        lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
        assert {line["key"] for line in lines} <= {str(p.relative_to(folder)) for p in folder.glob("*/*")}
        assert len(lines) == 2
        assert main(["run", str(path), "--only-quarantined", str(tmp_path / "bad.jsonl")]) == 1
    elif command == "index":
        for number, name in enumerate(names(rng, 4)):
            data = io.BytesIO()
            with tarfile.open(fileobj=data, mode="w", errors="surrogateescape") as tar:
                member = tarfile.TarInfo(f"{nasty(rng)}.jpg")
                tar.addfile(member)
                tar.addfile(tarfile.TarInfo(f"{nasty(rng)}.jpg"))
            (folder / f"{name}.tar").write_bytes(data.getvalue()[: 1000 if number else 1024])  # cut, or without its end
        main(["index", *(str(p) for p in folder.glob("*.tar"))])
        main(["check", str(pipeline(folder, kind="tar"))])
    else:
        folder = tmp_path / "model"
        folder.mkdir()
        tensors = {name.encode("utf-8", "replace").decode(): torch.zeros(2) for name in names(rng, 4)}
        save_file(tensors, folder / "x")
        for name in names(rng, 1):
            shutil.copy(folder / "x", folder / f"{name}.safetensors")
        (folder / "x").unlink()
        assert main(["restore", str(folder), "--list"]) == 0
        assert main(["restore", str(folder)]) == 0
        shutil.copy(next(folder.iterdir()), folder / "other.safetensors")
        assert main(["restore", str(folder)]) == 1
        assert main(["restore", str(tmp_path / nasty(rng))]) == 1
    out, err = capfd.readouterr()
    assert "\\x" in out + err or "\\u" in out + err
    for text in (out, err, *(record.getMessage() for record in caplog.records)):
        assert not OBEYED.search(text), text


def test_what_the_library_logs_and_warns_of(
    rng: random.Random, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / nasty(rng)
    for number, data in enumerate((b"x", b"y" * 600)):
        place = folder / f"{nasty(rng)}{number}"
        place.mkdir(parents=True)
        (place / f"{nasty(rng)}.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        latest(folder)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", errors="surrogateescape") as tar:
        tar.addfile(tarfile.TarInfo("0.jpg"))
    connector = MemoryConnector({f"{folder}/a.tar": archive.getvalue()[:512], f"{folder}/a.idx": b"v1.2 0\n"})
    with pytest.warns(UserWarning, match="does not fit its archive|ends without an end-of-archive mark") as warned:
        load_index(connector, connector.stat(f"{folder}/a.tar"), None)
    assert len(warned) == 2
    said = [str(caught.value), *(record.getMessage() for record in caplog.records), *(str(w.message) for w in warned)]
    assert len(said) == 5
    for text in said:
        assert not OBEYED.search(text), text


def test_a_bar_takes_no_name_for_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`[/]` closes what nothing has opened: Rich would raise, and restoring with it."""
    folder = tmp_path / "[" / "]model"
    folder.mkdir(parents=True)
    save_file({"x": torch.zeros(2)}, folder / "\x1b[2J:smile:.safetensors")
    screen = PlainConsole(file=sys.stderr, width=400, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stderr", lambda: screen)
    assert main(["restore", str(folder)]) == 0
    err = capfd.readouterr().err
    assert "[/]model/\\x1b[2J:smile:" in err
