"""The words of verdicts: an account of each kind, and in words.txt what is said of it. Elsewhere kind, key and setting count.

    PYTHONPATH=.:tests/helpers python tests/diagnosis/test_words.py

writes the file anew; read what has changed in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from made_accounts import row, services, stats

from loaderkit.diagnosis import changes, interval
from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import say
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.nodes.counts import Nodes, NodeStats

WORDS = Path(__file__).with_name("words.txt")
UNEVEN = services((0.01, 980), (0.5, 20))


def _with(seen: Stats, **host: Any) -> Stats:
    return replace(seen, host=replace(seen.host, **host))


def _of(name: str, busy_s: float, cpu_s: float, *, trial: ContentionResult = ContentionResult(), **more: Any) -> Stats:  # noqa: B008 - a tuple
    """A loop that waits for one stage."""
    options = {one: more.pop(one) for one in ("executor", "processes", "memory", "ahead_wait_s") if one in more}
    others = [row(other, 0.1, 0.1) for other in ("read", "call", "transfer") if other != name]
    return stats({name: 8.0, "start": 0.1}, [*others, row(name, busy_s, cpu_s, **more)], trial=trial, **options)


def accounts() -> Mapping[str, Stats]:
    """By name."""
    serial = ContentionResult(0.97, 0.98, slowdowns={"read": 1.9, "call": 1.9, "transfer": 1.9})
    alike = ContentionResult(0.52, 0.98, slowdowns={"read": 1.0, "call": 1.0})
    rows, waking = [row("read", 3, 1, blocked_s=17)], [row("read", 16, 4, blocked_s=4)]
    nodes = Nodes(
        (NodeStats("here", True, 0), NodeStats("far", False, 2, num_batches=9, num_bytes=10**9, way_s=9.0)), 2.0
    )
    return {
        "nothing yet": stats({}, rows, wall_s=0.0),
        "training": stats({"read": 0.2}, rows),
        "start": stats({"start": 2.0, "read": 0.5}, rows),
        "memory": stats({"memory": 6.0, "read": 2.0}, rows, memory=(100, 60)),
        "wakeup": stats({"wakeup": 4.0, "read": 1.0}, waking, idle_s=9.0),
        "wakeup beside others": _with(stats({"wakeup": 4.0}, waking, idle_s=0.0), others_s=18.0),
        "quota": _with(stats({"wakeup": 4.0}, waking), quota_cpus=0.5, throttled_s=6.0),
        "release": stats({"release": 4.0}, rows),
        "restart": replace(stats({"worker restart": 4.0}, rows), num_restarts=2),
        "network": replace(stats({"network": 5.0}, rows), nodes=nodes),
        "full network": replace(stats({"network": 5.0}, rows), nodes=replace(nodes, carrying_s=9.9)),
        "oversubscription": _with(_of("call", 19, 2), native_s=30.0),
        "gil": _of("call", 19, 9.2, trial=ContentionResult(1.02, 0.5, 0.9)),
        "gil in processes": _of("call", 19, 9.2, trial=ContentionResult(1.02, 0.5), executor="process", processes=1),
        "lock": _of("call", 19, 0.3, trial=serial),
        "bandwidth": _of("read", 19, 0.3, trial=serial, num_bytes=10**9),
        "bandwidth of a device": _of("transfer", 19, 0.3, trial=serial),
        "bandwidth of read-ahead": _of("read", 19, 0.3, num_bytes=10**9, ahead_wait_s=18.0),
        "latency": _of("read", 19, 0.3, trial=alike, services=services((0.02, 900))),
        "stragglers": _of("read", 19, 0.3, services=UNEVEN),
        "stragglers that compute": _of("call", 19, 18, services=UNEVEN),
        "one batch ahead": replace(one := _of("call", 9, 8, blocked_s=3), tuning=replace(one.tuning, batches=1)),
        "one batch of one chunk": replace(
            one := _of("call", 9, 9, workers=4, blocked_s=1, idle_s=30.0, trial=ContentionResult(1.4, 0.3, 0.1, 2.8)),
            tuning=replace(one.tuning, batches=1),
        ),
        "two together": stats({"read": 4.0, "call": 4.5}, [row("read", 9, 0.3), row("call", 9, 8.9)], apart=True),
        "gil or computing": _of("call", 12, 9.8, starved_s=8, trial=ContentionResult(0.95, 0.2, 0.7, 2.0)),
        "a few batches": stats({"start": 8.0, "read": 0.5}, rows, batches=3),
        "depth": _of("read", 9, 0.5, blocked_s=10),
        "computing": _of("call", 19, 18),
        "computing pictures": _of("decode", 19, 18),
        "computing videos": _of("decode", 19, 18, content="media"),
        "long videos": _of("decode", 19, 18, content="media", services=UNEVEN),
        "computing on all CPUs": _of("call", 39, 36, workers=4),
        "computing inline": _of("read", 8, 7.5, workers=1, blocked_s=2, executor="inline"),
        "an iterable": _of("read", 9, 1, workers=1, in_turn=True, num_items=90),
        "user code": _of("call", 9.5, 1, alone=True, num_items=90),
        "waiting": _of("call", 9.5, 0.3, workers=1),
    }


def said() -> str:
    """What is said of all of them, on a machine with 4 CPUs and 8 GiB."""
    lines = []
    machine = (
        patch.object(interval, "free_memory", lambda: (2**33, "it")),
        patch.object(changes, "num_cpus_of_rank", lambda: 4),
    )
    with machine[0], machine[1]:
        for name, seen in accounts().items():
            found = seen.verdict()
            lines += [
                f"{name}: {found.headline}",
                found.evidence,
                found.change,
                say(found.settings),
                "",
            ]
    return "\n".join(lines)


def test_words() -> None:
    assert said() == WORDS.read_text()


if __name__ == "__main__":
    WORDS.write_text(said())
