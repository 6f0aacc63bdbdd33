"""NUMA nodes as the kernel lists them, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaderkit._internal.system.numa import numa_conflict

GPU = "0000:3b:00.0"


def machine(
    root: Path, *, cpus: str, memory: str = "0-1", gpu: str = "0", nodes: tuple[str, ...] = ("0-3", "4-7")
) -> Path:
    files = {f"sys/devices/system/node/node{number}/cpulist": those for number, those in enumerate(nodes)}
    files["proc/self/status"] = f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}\n"
    files[f"sys/bus/pci/devices/{GPU}/numa_node"] = gpu
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("cpus", "memory", "gpu", "said"),
    [
        ("4-7", "0-1", "0", "on NUMA node 1 only, and its GPU is on node 0"),
        ("5", "0", "1", "on NUMA node 1 only, and its memory is on node 0"),
        ("0-1,3", "0-1", "1", "numactl --cpunodebind=1"),
        ("0-7", "0-1", "0", None),
        ("0-3", "0", "0", None),
        ("4-7", "0-1", "-1", None),  # firmware that names no node
    ],
)
def test_what_lies_apart_is_told(tmp_path: Path, cpus: str, memory: str, gpu: str, said: str | None) -> None:
    found = numa_conflict(GPU, machine(tmp_path, cpus=cpus, memory=memory, gpu=gpu))
    assert found is None if said is None else said in (found or "")


def test_nothing_is_said_without_a_gpu_or_several_nodes(tmp_path: Path) -> None:
    assert numa_conflict(None, machine(tmp_path / "two", cpus="4-7")) is None
    assert numa_conflict(GPU, machine(tmp_path / "one", cpus="0-3", nodes=("0-7",))) is None
    assert numa_conflict(GPU, machine(tmp_path / "memory", cpus="0-3", nodes=("0-7", ""), gpu="1")) is None
    assert numa_conflict(GPU, tmp_path / "none") is None
