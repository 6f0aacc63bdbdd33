"""How much memory can still be had, so that batches that will not fit are refused before they are begun.

Pages of shared memory that a cgroup does not allow are no error: the system kills a process, some minutes into the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loaderkit.errors import ConfigError
from loaderkit.schema import say_bytes

_ROOT = Path("/")


def check_room(num_batches: int, batch_bytes: int, *, root: Path = _ROOT) -> None:
    """Raise ConfigError if there is no memory for so many batches of that size."""
    free, whose = min(_free(root), default=(None, ""))
    needed = num_batches * batch_bytes
    if free is not None and needed > free:
        raise ConfigError(
            f"{num_batches} batches ahead take {say_bytes(needed)} of shared memory, and {whose} has {say_bytes(free)} left, "
            f"so that the system would kill a process: make prefetch.batches, prefetch.memory or stages.batch.size smaller"
        )


def _free(root: Path) -> Iterator[tuple[int, str]]:
    """Bytes that can be had, and who says so: the machine, and every cgroup with a limit (v2 and v1) that we are in."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        yield 1024 * (kilobytes["MemAvailable"] + kilobytes["SwapFree"]), "the machine"
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, KeyError, ValueError):
        return
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        limit, used, cache = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}_file")
            if controllers
            else ("memory.max", "memory.current", "{}_file")
        )
        folder = mounted / group.lstrip("/")
        while folder.is_relative_to(mounted):
            try:
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                # Cached pages of files are given up before anybody is killed.
                given_up = int(stat[cache.format("active")]) + int(stat[cache.format("inactive")])
                free = int((folder / limit).read_text()) - int((folder / used).read_text()) + given_up
                yield free, f"this process's cgroup ({folder})"
            except (OSError, KeyError, ValueError):  # no such file at this level, or "max"
                pass
            folder = folder.parent
