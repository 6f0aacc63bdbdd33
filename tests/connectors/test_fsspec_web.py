"""http:// through fsspec, against a real web server: index pages that name files and nothing else, ranges, what is missing."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from buckets import epoch_of

from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.fsspec import FsspecConnector
from loaderkit.errors import ObjectChangedError, ObjectNotFoundError, ShortReadError, UnreachableError

pytest.importorskip("aiohttp")


class WithRanges(SimpleHTTPRequestHandler):
    """Serves a folder as nginx does: with ranges, and with index pages unless the folder is called hidden."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def list_directory(self, path: Any) -> Any:
        if "hidden" in str(path):
            return self.send_error(404)
        if "reset" in str(path):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return None
        return super().list_directory(path)

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if found is None or not path.is_file():
            return super().do_GET()
        data = path.read_bytes()
        start, end = int(found[1]), min(int(found[2]) + 1, len(data))
        self.send_response(206 if start < end else 416)
        self.send_header("Content-Length", str(max(0, end - start)))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(data[start:end])
        return None


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))
    folder = tmp_path / "www"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(WithRanges, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_pipeline(web: tuple[Path, str], photos: Path) -> None:
    folder, url = web
    (folder / "photos").symlink_to(photos)
    source = {"kind": "files", "include": "**/*.jpg", "label": "parent"}
    assert epoch_of({**source, "url": f"{url}/photos"})[0] == epoch_of({**source, "url": str(photos)})[0]


@pytest.mark.parametrize("place", ["shards", "hidden"])
def test_shards_by_name(web: tuple[Path, str], shards: Path, place: str) -> None:
    """Where no page lists them, too."""
    folder, url = web
    (folder / place).symlink_to(shards)
    source = {"kind": "tar", "fields": {"image": "jpg", "label": "cls"}}
    names = "shard-{000..002}.tar"
    assert (
        epoch_of({**source, "url": f"{url}/{place}/{names}"})[0] == epoch_of({**source, "url": f"{shards}/{names}"})[0]
    )


@pytest.mark.parametrize("place", ["reset", "a/b/reset"])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(web: tuple[Path, str], place: str) -> None:
    folder, url = web
    for name in ("a/b/1", f"{place}/2", "z/3"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    connector = FsspecConnector(url)
    with pytest.raises(UnreachableError, match="the connection failed"):
        list(connector.list(""))
    connector.close()


def test_what_a_page_lists_and_is_not_there_is_said(web: tuple[Path, str]) -> None:
    folder, url = web
    (folder / "a" / "hidden").mkdir(parents=True)
    (folder / "a" / "hidden" / "2").write_bytes(b"x")
    (folder / "1").write_bytes(b"x")
    (folder / "nowhere").symlink_to(folder / "gone")
    connector = FsspecConnector(url.replace("://", "://user:secret@"))
    with pytest.warns(UserWarning, match=r"is left out \(2, such as 'a/hidden'\)") as caught:
        assert [info.key for info in connector.list("")] == ["1"]
    assert "secret" not in str(caught[0].message)
    connector.close()


@pytest.mark.filterwarnings("ignore:below .* what is listed and is no file is left out")
def test_a_page_that_leads_back_is_listed_once(web: tuple[Path, str]) -> None:
    folder, url = web
    (folder / "data" / "b").mkdir(parents=True)
    (folder / "data" / "b" / "1").write_bytes(b"x")
    links = "".join(f'<a href="{link}">x</a>' for link in ("./", "../", "../../", "/", "b/", "?C=N", "b/./"))
    (folder / "data" / "index.html").write_text(links)
    connector = FsspecConnector(f"{url}/data")
    assert "b/1" in [info.key for info in connector.list("")]
    connector.close()


def test_names_are_those_of_the_files(web: tuple[Path, str], rng: random.Random) -> None:
    """Though a page's links are percent-encoded: classes are sorted as they are in a local folder."""
    folder, url = web
    for _ in range(12):
        name = "".join(rng.choice("ab0 _-&=;,@!$(~äßé中\U0001f40d[") for _ in range(rng.randrange(1, 9))).strip()
        path = folder / "data set" / f"c{name}" / f"{name} 1.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    local, remote = FileConnector(folder / "data set"), FsspecConnector(f"{url}/data set")
    keys = [info.key for info in local.list("")]
    assert [info.key for info in remote.list("")] == keys
    for info in remote.list(""):
        buffer = bytearray(info.size)
        remote.read_into(info.key, 0, memoryview(buffer), etag=info.etag)
        assert buffer.decode() == info.key.partition("/")[0][1:]
        assert next(remote.list(info.key)) == info
    remote.close()


@pytest.mark.parametrize("root", ["my set", "my%20set"])
def test_what_means_something_in_a_link_stays_encoded(web: tuple[Path, str], root: str) -> None:
    """So do names that are no UTF-8, each by itself: the others in that folder are as they were written."""
    folder, url = web
    names = [b"50%.txt", b"a#1.txt", b"b?c.txt", b"%41.txt", b"c+d.txt", b"\xe9.txt", "é f.txt".encode()]
    (folder / "my set" / "a b").mkdir(parents=True)
    for name in names:
        (folder / "my set" / "a b" / os.fsdecode(name)).write_bytes(name)
    connector = FsspecConnector(f"{url}/{root}")
    keys = [info.key for info in connector.list("")]
    assert "a b/é f.txt" in keys
    for key in keys:
        buffer = bytearray(connector.stat(key).size)
        connector.read_into(key, 0, memoryview(buffer))
        names.remove(bytes(buffer))
        assert key.startswith("a b/")
        assert unquote(key, errors="surrogatepass") == os.fsdecode(b"a b/" + buffer)  # as this server writes it
    assert not names
    connector.close()


def test_a_file_that_is_linked_to_twice_is_one(web: tuple[Path, str]) -> None:
    folder, url = web
    (folder / "a b").write_bytes(b"x")
    (folder / "index.html").write_text('<a href="a%20b">x</a> <a href="a b">x</a> <a href="/a%20b">x</a>')
    connector = FsspecConnector(url)
    assert [info.key for info in connector.list("")] == ["a b"]
    connector.close()


def test_replaced_and_cut_short(web: tuple[Path, str]) -> None:
    folder, url = web
    (folder / "a").write_bytes(b"abcdef")
    connector = FsspecConnector(url)
    info = connector.stat("a")
    assert list(connector.list("")) == [info]
    buffer = bytearray(3)
    connector.read_into("a", 2, memoryview(buffer), etag=info.etag)
    assert buffer == b"cde"
    with pytest.raises(ShortReadError):
        connector.read_into("a", 4, memoryview(buffer), etag=info.etag)
    (folder / "a").write_bytes(b"abcdefg")
    with pytest.raises(ObjectChangedError):
        connector.read_into("a", 2, memoryview(buffer), etag=info.etag)
    connector.close()


@pytest.mark.parametrize("key", ["%2e%2e/outside", "in/%2E./%2e./outside", "in/.%2e/%2e%2E/outside", "%2e/a"])
def test_keys_cannot_climb(web: tuple[Path, str], key: str) -> None:
    """A link's %2e is a dot: what is above the URL is not to be had by such a key."""
    folder, url = web
    (folder / "inside" / "in").mkdir(parents=True)
    (folder / "outside").write_bytes(b"secret")
    (folder / "inside" / "a").write_bytes(b"public")
    connector = FsspecConnector(f"{url}/inside")
    assert connector.stat("a").size == 6
    with pytest.raises(ObjectNotFoundError, match="is no key"):
        connector.stat(key)
    connector.close()
