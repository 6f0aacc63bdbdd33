"""Programs that end in every way a training may: each with its exit code, in time, and with nothing left running."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from profiles.gpu_session.context import Context
from profiles.gpu_session.programs import ROOT

WITHOUT_CLOSE, BREAK, INTERRUPTED, SAVING = "without_close", "break", "interrupted", "saving"
_PROGRAM = """
import sys, threading
from pathlib import Path
import torch
import loaderkit
from profiles.gpu_session.context import Context, Report
from profiles.gpu_session.pictures_pipeline import ahead, crops
how, executor, work, is_tiny, checkpoints = sys.argv[1:]
context = Context(Path(work), Path(work), is_tiny == "1", Report(Path(work) / f"{how}-{executor}.ends"))
made = crops(context, batch=16)
if how == "saving":
    state = {"w": torch.ones(2**24, device=context.device)}
    manager = loaderkit.CheckpointManager(checkpoints, flush=executor)
    manager.save(1, state)
    print("ready", flush=True)
    sys.exit(0)
loader = loaderkit.build(made, overrides=ahead(**{"prefetch.executor": executor}))
if how == "break":
    with loader:
        for batch in loader:
            break
    print("ready", flush=True)
    assert batch["image"].isfinite().all()
    sys.exit(0)
for number, batch in enumerate(loader):
    if number == 2:
        break
print("ready", flush=True)
if how == "interrupted":
    while True:
        for batch in loader:
            batch["image"].sum().item()
"""
_READY_S, _END_S, _FAREWELL_S = 16.0, 6.0, 2.0
_CTRL_C = (-signal.SIGINT, 130, 1)


def measure(context: Context) -> None:
    """Without `close`, `break` with copies in flight, Ctrl-C, and a save that is still being written; all at once."""
    context.photos()
    cases = [(how, executor) for how in (WITHOUT_CLOSE, BREAK, INTERRUPTED, SAVING) for executor in ("thread", "process")]
    if context.is_tiny:
        cases = [(WITHOUT_CLOSE, "process"), (BREAK, "thread"), (INTERRUPTED, "process"), (SAVING, "thread")]
    with ThreadPoolExecutor(len(cases) if not context.is_tiny else 2) as pool:
        wrong = [what for what in pool.map(lambda case: _end(context, *case), cases) if what is not None]
    assert not wrong, "; ".join(wrong)


def _end(context: Context, how: str, executor: str) -> str | None:
    """Run one to its end; what is wrong with it."""
    name = f"{how}_{executor}"
    with tempfile.TemporaryDirectory(dir=context.work) as folder:
        checkpoints = Path(folder) / "checkpoints"
        arguments = [how, executor, str(context.work), "1" if context.is_tiny else "0", str(checkpoints)]
        errors = Path(folder) / "stderr"
        with errors.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=said
            )
            try:
                took_s, left = _watched(process, how)
            finally:
                process.kill()
                process.wait()
        rc = process.returncode
        context.report.add(**{f"{name}_rc": rc, f"{name}_end_s": took_s})
        text = errors.read_text(errors="replace")
        if left:
            return f"{name}: {left} processes were left running"
        if rc not in (_CTRL_C if how == INTERRUPTED else (0,)):
            return f"{name}: exit code {rc}: {text[-1500:]}"
        if how == SAVING and not (checkpoints / "step-0000000001" / "loaderkit-manifest.json").exists():
            return f"{name}: the checkpoint is not there: {text[-1500:]}"
    return None


def _watched(process: subprocess.Popen[bytes], how: str) -> tuple[float, int]:
    """Seconds from "ready" until its end, and how many of its processes outlived it."""
    assert process.stdout is not None
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(process.stdout.readline)
        try:
            line.result(_READY_S)
        except TimeoutError:
            process.kill()
            raise
    family = descendants(process.pid)
    if how == INTERRUPTED:
        process.send_signal(signal.SIGINT)
    begin_s = time.perf_counter()
    process.wait(_END_S)
    took_s = time.perf_counter() - begin_s
    until_s = time.perf_counter() + _FAREWELL_S
    while (alive := [pid for pid in family if _is_alive(pid)]) and time.perf_counter() < until_s:
        time.sleep(0.05)
    return took_s, len(alive)


def descendants(pid: int) -> list[int]:
    """The processes that a process has begun, and those that they have."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found + [grandchild for child in found for grandchild in descendants(child)]


def _is_alive(pid: int) -> bool:
    """A zombie, which nobody has asked for its exit code, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
