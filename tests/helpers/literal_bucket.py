"""A server of one bucket that takes keys literally, as AWS does: "a//b" and "a/b" are two objects. SeaweedFS makes one of
them. It checks no signatures."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Mapping[str, bytes]

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        key = unquote(place.path).removeprefix("/bucket").removeprefix("/")
        if not key:
            return self._answer(200, self._listing(parse_qs(place.query).get("prefix", [""])[0]))
        data = self.objects.get(key)
        if data is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None:
            return self._answer(200, data, ETag=_etag(data))
        start, end = int(found[1]), min(int(found[2]) + 1, len(data))
        where = f"bytes {start}-{end - 1}/{len(data)}"
        return self._answer(206, data[start:end], ETag=_etag(data), Content_Range=where)

    def _listing(self, prefix: str) -> bytes:
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>{_etag(data)}</ETag>"
            f"<Size>{len(data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, data in self.objects.items()
            if key.startswith(prefix)
        )
        head = f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        return f"<?xml version='1.0'?><ListBucketResult>{head}{found}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            **headers,
            "Content_Length": str(len(body)),
            "Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT",
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return f'"{md5(data, usedforsecurity=False).hexdigest()}"'


@contextmanager
def literal_bucket(objects: Mapping[str, bytes]) -> Iterator[str]:
    """The endpoint of a server whose bucket `bucket` has these objects."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"objects": objects}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
