"""Train with FSDP2 on some ranks, stop, and continue with another number of them: all ranks save one checkpoint.

    torchrun --nproc-per-node 2 examples/restore_fsdp.py --steps 4 --folder runs
    torchrun --nproc-per-node 3 examples/restore_fsdp.py --steps 8 --folder runs

SIGTERM to any rank ends the job after a step that is the same on all of them, and saved; the next start continues there.
Runs on CPUs (gloo). The data's order depends on the position alone, so the second run continues with the next samples; the
global batch must be the same in both, 12 samples here.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import loaderkit

GLOBAL_BATCH = 12


def make(rank: int, world_size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, loaderkit.Loader]:
    torch.manual_seed(0)  # the same weights on all ranks
    model = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.arange(9600.0).reshape(1200, 8) / 9600, torch.arange(1200.0) / 1200)
    pipeline = (
        loaderkit.Pipeline.dataset(data, fields=["x", "y"])
        .shuffle(seed=1)
        .read()
        .batch(GLOBAL_BATCH // world_size, drop_last=True)
    )
    return model, optimizer, loaderkit.build(pipeline, rank=rank, world_size=world_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", default="runs")
    parser.add_argument("--save-every", type=int, default=2, metavar="STEPS")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    model, optimizer, loader = make(rank, world_size)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    notice = {"signals": ["SIGTERM"]}  # as schedulers send it, to one rank or all, before they end a job
    with loader, loaderkit.CheckpointManager(args.folder, every=args.save_every, notice=notice) as checkpoints:
        step = checkpoints.restore(state) or 0  # the newest whole one, whatever number of ranks has saved it
        if rank == 0:
            print(f"continues after step {step} with {world_size} ranks" if step else "begins anew")
        for batch in loader:
            loss = (model(batch["x"]).squeeze(1) - batch["y"]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            seen = [loss.detach()]
            dist.all_reduce(seen[0])
            if rank == 0:
                print(f"step {step}: {(seen[0] / world_size).item():.9g}")
            is_last = step == args.steps
            checkpoints.save(step, state, force=is_last)  # copied, and written behind the next steps
            if is_last:
                break
            if checkpoints.reached_preemption(step):  # at the same step on all ranks, which is saved
                print(f"rank {rank} stops after step {step}")
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
