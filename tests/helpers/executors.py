"""The executors, as overrides."""

from __future__ import annotations

from typing import Any

EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"prefetch.executor": "inline"},
    "thread": {"prefetch.executor": "thread", "prefetch.concurrency": 2},
    "process": {"prefetch.executor": "process", "prefetch.concurrency": 2},
    "two processes": {"prefetch.executor": "process", "prefetch.processes": 2, "prefetch.concurrency": 2},
}
