"""Trainings: DistributedDataParallel over NCCL with one rank, and examples/train.py stopped and resumed."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from profiles.gpu_session.context import Context
from profiles.gpu_session.programs import Ended, run_programs

_DDP = """
import os, socket, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
import loaderkit
from profiles.gpu_session.context import Context, Report
from profiles.gpu_session.pictures_pipeline import ahead, crops
work, checkpoints, is_tiny = sys.argv[1:]
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
context = Context(Path(work), Path(work), is_tiny == "1", Report(Path(work) / "ddp.figures"))
if context.on_gpu:
    torch.cuda.set_device(context.device)
dist.init_process_group("nccl" if context.on_gpu else "gloo")
torch.manual_seed(0)
network = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
model = nn.parallel.DistributedDataParallel(network.to(context.device))
optimizer = torch.optim.AdamW(model.parameters())
with loaderkit.build(crops(context), overrides=ahead()) as loader:
    manager = loaderkit.CheckpointManager(checkpoints)
    with manager:
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        for step, batch in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.save(step, state)
            if step == 4:
                break
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
        manager.wait_until_finished()
        assert manager.restore(state) == step
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
dist.destroy_process_group()
print(f"ddp {dist.Backend.NCCL if context.on_gpu else 'gloo'}: {step} steps, loss {loss.item():.3f}")
"""
_BATCH = re.compile(r"^epoch (\d+) batch (\d+) loss (\S+) first (\S+)$", re.MULTILINE)
_FIRST = 0.6  # of the time for the trainings that are not resumed


def measure(context: Context) -> None:
    """All at once; then the second half of the training that was stopped."""
    photos, size = context.photos(), str(context.sized(64, 8))
    with tempfile.TemporaryDirectory(dir=context.work) as name:
        folder = Path(name)

        def train(checkpoints: str, *more: str) -> list[str]:
            own = ["examples/train.py", str(photos), "--epochs", "2", "--batch-size", size]
            return [*own, "--checkpoints", str(folder / checkpoints), "--save-every", "3", *more]

        tiny = "1" if context.is_tiny else "0"
        first = {
            "ddp": ["-c", _DDP, str(context.work), str(folder / "ddp"), tiny],
            "stopped": train("parts", "--max-batches", "4"),
        }
        if not context.is_tiny:
            first["whole"] = train("whole", "--max-batches", "8")
        ended = run_programs(first, context.left_s() * _FIRST, at_once=3)
        ended |= run_programs({"resumed": train("parts", "--max-batches", "4")}, context.left_s(), 1)
    for name, program in ended.items():
        context.report.add(**{f"{name}_rc": program.rc, f"{name}_s": program.seconds})
    bad = [f"{name}: {program.rc}: {program.stderr[-1200:]}" for name, program in ended.items() if program.rc != 0]
    assert not bad, "; ".join(bad)
    _compare(context, ended)


def _compare(context: Context, ended: dict[str, Ended]) -> None:
    """The parts have seen what the whole has seen; losses differ by what kernels that add in any order differ."""
    assert "resumed epoch" in ended["resumed"].stdout, ended["resumed"].stdout[-500:]
    context.report.add(ddp=ended["ddp"].stdout.strip())
    if "whole" not in ended:
        return
    whole, stopped, resumed = (_BATCH.findall(ended[name].stdout) for name in ("whole", "stopped", "resumed"))
    parts = stopped + resumed
    assert [batch[:2] + batch[3:] for batch in parts] == [batch[:2] + batch[3:] for batch in whole], (whole, parts)
    worst = max(abs(float(one[2]) - float(other[2])) for one, other in zip(whole, parts, strict=True))
    assert worst < 0.05, (whole, parts)
    context.report.add(num_batches=len(whole), largest_difference_of_losses=worst)
