"""Batches for which there is no memory are refused, wherever the limit is set."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from loaderkit import Pipeline
from loaderkit._internal.system.cgroups import oom_kills
from loaderkit.engine.process.shared_memory import Allocator, SharedArena, check_room
from loaderkit.errors import ConfigError
from loaderkit.pipeline.batches.plan import BatchPlan
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.pipeline.executors.thread_engine import make_batch_plan
from loaderkit.sampling.shard import Shard

MIB = 2**20


class Megabytes:
    """Samples of a MiB."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> np.ndarray:
        return np.zeros(MIB, np.uint8)


def lay_out(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:  900000 kB\nSwapFree: 124000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        place = root / "sys/fs/cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


def group(folder: str, limit: str, used: int, cache: int) -> dict[str, str]:
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used * MIB),
        f"{folder}/memory.stat": f"anon 5\nactive_file {cache * MIB}\ninactive_file {cache * MIB}\n",
    }


def test_the_machine(tmp_path: Path) -> None:
    root = lay_out(tmp_path, "0::/\n", {})
    check_room(10, 100 * MIB, root=root)  # 1,000 MiB with swap
    with pytest.raises(
        ConfigError, match="11 batches ahead take 1100 MiB of shared memory, and the machine has 1000 MiB"
    ):
        check_room(11, 100 * MIB, root=root)


def test_any_of_the_groups_above_us(tmp_path: Path) -> None:
    """Cached pages of files count as free; "max" is no limit."""
    files = group("jobs", str(300 * MIB), 250, 20) | group("jobs/ours", "max", 100, 20)
    root = lay_out(tmp_path, "0::/jobs/ours\n", files)
    check_room(9, 10 * MIB, root=root)
    with pytest.raises(ConfigError, match=r"cgroup \(.*/sys/fs/cgroup/jobs\) has 90 MiB left"):
        check_room(10, 10 * MIB, root=root)


def test_version_one_seen_from_a_container(tmp_path: Path) -> None:
    """The path is that of the host, of which only the end, our own group, is mounted."""
    files = {
        "memory/memory.limit_in_bytes": str(64 * MIB),
        "memory/memory.usage_in_bytes": str(60 * MIB),
        "memory/memory.stat": "total_active_file 0\ntotal_inactive_file 1048576\n",
    }
    root = lay_out(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n", files)
    check_room(1, 5 * MIB, root=root)
    with pytest.raises(ConfigError, match=r"sys/fs/cgroup/memory\) has 5120 KiB left"):
        check_room(2, 5 * MIB, root=root)


def test_of_all_processes_and_of_what_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process knows its own batches only, and is told later that they may be more, by the tuner say."""
    root = lay_out(tmp_path, "0::/jobs\n", group("jobs", "max", 300, 0))
    arena = SharedArena.create()
    arena.release_descriptor()  # no memory is taken
    pipeline = Pipeline.dataset(Megabytes()).read().batch(1).prefetch(batches=10)
    execution = compile_pipeline(pipeline.config, rank=0, world_size=1)
    monkeypatch.setattr("loaderkit.pipeline.batches.memory.check_room", partial(check_room, root=root))

    def plan_of(share: Shard) -> BatchPlan:
        plan = make_batch_plan(replace(execution, shard=share), Allocator(arena))
        plan.prepare()
        return plan

    def allow(num_mib: int) -> None:
        (root / "sys/fs/cgroup/jobs/memory.max").write_text(str((300 + num_mib) * MIB + MIB // 2))

    allow(9)
    with pytest.raises(ConfigError, match="10 batches ahead take"):
        plan_of(Shard(1, 2))
    allow(10)
    plan = plan_of(Shard(1, 2))
    before = plan.room
    with pytest.raises(ConfigError, match="30 batches ahead take"):
        plan.set_depth(20, None)
    assert plan.room == before
    plan.set_depth(8, None)
    assert plan.room == (8, False)


def test_where_nothing_is_known_nothing_is_refused(tmp_path: Path) -> None:
    check_room(100, 2**40, root=tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/job\n", {"job/memory.events": "low 0\noom 7\noom_kill 5\n", "memory.events": "oom_kill 9\n"}, 5),
        ("0::/job\n", {"memory.events": "oom_kill 9\n"}, 9),
        ("4:memory:/job\n", {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}, 3),
        ("0::/\n", {}, 11),
        ("4:memory:/job\n", {"memory/job/memory.oom_control": "oom_kill_disable 0\n"}, 11),
    ],
)
def test_how_many_the_kernel_has_killed(cgroup: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    root = lay_out(tmp_path, cgroup, files)
    assert oom_kills(root) in (None, expected)
    (root / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 11\n")
    assert oom_kills(root) == expected
