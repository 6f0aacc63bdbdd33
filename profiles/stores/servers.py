"""Where the bytes come from: SeaweedFS with keys enforced, nginx for one large object where it is installed, and a delay."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from seaweed import ACCESS_KEY, SECRET_KEY, Seaweed, free_port

__all__ = ["ACCESS_KEY", "SECRET_KEY", "Seaweed", "delay", "free_port", "nginx", "upload"]

_CONFIG = """
{user} daemon off; worker_processes 2; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000; max_ranges 1;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder}; uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  server {{ listen 127.0.0.1:{port}; root {root}; default_type application/octet-stream; {others} }}
}}
"""
# Listings come from another server, which has other etags for the same objects.
_LISTINGS = """
  proxy_set_header Host $http_host; sub_filter_types application/xml; sub_filter_once off; {etags}
  location / {{ if ($args ~ "list-type") {{ proxy_pass http://127.0.0.1:{port}; }} try_files $uri =404; }}
"""


@contextmanager
def nginx(root: Path, folder: Path, listings: int = 0, etags: Mapping[str, str] | None = None) -> Iterator[str | None]:
    """The endpoint of an nginx that serves files below `root` as /bucket/key; None where there is no nginx.

    `listings`: the port of a server that lists the same objects; `etags`: its etags by /bucket/key.
    """
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config = folder / "nginx.conf"
    user = "user root;" if os.getuid() == 0 else ""  # its workers must be able to read what we wrote
    own = {path: _etag(root / path.lstrip("/")) for path in etags or {}}
    renamed = " ".join(f"sub_filter '{etag}' '{own[path]}';" for path, etag in (etags or {}).items())
    others = _LISTINGS.format(port=listings, etags=renamed) if listings else ""
    config.write_text(_CONFIG.format(folder=folder, port=port, root=root, user=user, others=others))
    process = subprocess.Popen([program, "-c", str(config), "-p", str(folder)])
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _etag(path: Path) -> str:
    """As nginx makes it."""
    about = path.stat()
    return f"{int(about.st_mtime):x}-{about.st_size:x}"


def upload(server: Seaweed, folder: Path, bucket: str) -> None:
    """All files of a folder, each in one part."""
    client: Any = server.boto()
    client.create_bucket(Bucket=bucket)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=path.relative_to(folder).as_posix(), Body=path.read_bytes())


@contextmanager
def delay(port: int, wait_s: float) -> Iterator[str]:
    """The endpoint of a process that passes bytes on to `port` of this machine, those of requests only after `wait_s`."""
    command = [sys.executable, "-m", "profiles.stores.servers", str(port), str(wait_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _serve(port: int, wait_s: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pass_on, args=(client, server, wait_s), daemon=True).start()
        threading.Thread(target=_pass_on, args=(server, client, 0.0), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, wait_s: float) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 18):
            time.sleep(wait_s)
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
