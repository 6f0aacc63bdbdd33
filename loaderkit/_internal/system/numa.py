"""NUMA: on which nodes this program may run, and where its memory and its GPU are."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


def numa_conflict(gpu: str | None, root: Path = _ROOT) -> str | None:
    """Why the CPUs, memory or GPU of this process lie on different NUMA nodes, and what to do. None if they do not, or
    if it is not known.

    `gpu` is its address on the PCI bus. The function sees what the kernel allows, affinity and cpusets, not where pages lie.
    """
    system = root / "sys/devices/system/node"
    nodes = {int(folder.name[4:]): _listed(folder / "cpulist") for folder in system.glob("node[0-9]*")}
    allowed = {node for node, cpus in nodes.items() if cpus & _listed(root / "proc/self/status", "Cpus_allowed_list:")}
    memory = _listed(root / "proc/self/status", "Mems_allowed_list:")
    with_cpus = {node for node, cpus in nodes.items() if cpus}
    if len(with_cpus) < 2 or not allowed:
        return None
    of_gpu = _listed(root / "sys/bus/pci/devices" / gpu / "numa_node") if gpu is not None else set()
    for what, there in (("its memory", memory), ("its GPU", of_gpu)):
        if there & with_cpus and there.isdisjoint(allowed):
            here, node = (", ".join(map(str, sorted(found))) for found in (allowed, there & with_cpus))
            return (
                f"this program may run on NUMA node {here} only, and {what} is on node {node}, so that each batch crosses the "
                f"link between them: numactl --cpunodebind={node.replace(' ', '')}, or CPUs of that node from the scheduler"
            )
    return None


def _listed(file: Path, name: str = "") -> set[int]:
    """The numbers of a list such as 0-3,8, in the line that begins with `name`; empty if there are none, or none below 0."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return set()
    text = next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), "")
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        if low:  # a GPU of no known node has -1
            found |= {*range(int(low), int(high or low) + 1)}
    return found
