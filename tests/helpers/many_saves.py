"""Many saves in a row by some ranks, and what they hold meanwhile: a module of its own, as other processes import it."""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from manager_programs import train_step, training_state

import loaderkit
from loaderkit.ranks.store import default_store


def held() -> dict[str, int]:
    """Resident bytes, open descriptors, threads, and keys of the store that all ranks share."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident_bytes": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "native_threads": len(os.listdir("/proc/self/task")),
        "keys": default_store().num_keys(),
    }


def save_many_times(rank: int, num_ranks: int, folder: Path, port: int, num_saves: int) -> None:
    """Save after every step, keep three; five times on the way write what is held."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    state = training_state(rank, num_ranks, sharded=True)
    state["large"] = torch.zeros(num_ranks, 1 << 18)
    found = []
    with loaderkit.CheckpointManager(folder / "run", keep={"last": 3}, timeout_s=60.0) as checkpoints:
        for step in range(1, num_saves + 1):
            train_step(state, step)
            state["large"].fill_(step)
            checkpoints.save(step, state)
            if step % (num_saves // 5) == 0:
                checkpoints.wait_until_finished()
                dist.barrier()
                found.append(held())
                dist.barrier()
        steps = checkpoints.all_steps()
    (folder / f"held-{rank}.json").write_text(json.dumps({"held": found, "steps": steps}))
    dist.destroy_process_group()
