"""Sources in a bucket behind a proxy, and which requests to disturb."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buckets import epoch_of
from fault_proxy import Fault, FaultProxy, Request

BLOCKS = {"shuffle": "block", "seed": 3, "block": {"block": "20KiB", "window": 3, "lanes": 2}}


def source(proxy: FaultProxy, kind: str, **more: Any) -> dict[str, Any]:
    """The photographs through the proxy."""
    s3: dict[str, Any] = {"endpoint": proxy.endpoint, "connections": 8}
    found: dict[str, Any]
    if kind == "files":
        found = {"url": "s3://faults/photos", "include": "**/*.jpg", "label": "parent"}
    else:
        found = {"url": "s3://faults/shards", "fields": {"image": "jpg", "label": "cls"}}
    return {"kind": kind, "s3": s3, "retry": {"total": "40s", "timeout": "1500ms"}, **found, **more}


def local(photos: Path, shards: Path, kind: str) -> list[str]:
    if kind == "files":
        return epoch_of({"kind": "files", "url": str(photos), "include": "**/*.jpg", "label": "parent"})[0]
    return epoch_of({"kind": "tar", "url": str(shards), "fields": {"image": "jpg", "label": "cls"}}, BLOCKS)[0]


def is_read(request: Request) -> bool:
    """Whether a request is for the bytes of an object."""
    return request.method == "GET" and "list-type" not in request.path


def now_and_then(fault: Fault, every: int = 7) -> Callable[[Request], Fault | None]:
    """For each `every`-th request for bytes."""
    seen = iter(range(10**9))
    lock = threading.Lock()

    def rule(request: Request) -> Fault | None:
        if not is_read(request):
            return None
        with lock:
            return fault if next(seen) % every == every - 1 else None

    return rule
