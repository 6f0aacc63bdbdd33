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
import faulthandler, signal, sys
from pathlib import Path
import torch
import loaderkit
from profiles.gpu_session.context import Context, Report
from profiles.gpu_session.pictures_pipeline import ahead, crops
how, executor, work, is_tiny, checkpoints, left_s = sys.argv[1:]
faulthandler.dump_traceback_later(float(left_s), exit=False)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
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
_FAREWELL_S = 2.0
_CTRL_C = (-signal.SIGINT, 130, 1)


def measure(context: Context) -> None:
    """Without `close`, `break` with copies in flight, Ctrl-C, and a save that is still being written; all at once."""
    context.photos()
    cases = [
        (how, executor) for how in (WITHOUT_CLOSE, BREAK, INTERRUPTED, SAVING) for executor in ("thread", "process")
    ]
    if context.is_tiny:
        cases = [(WITHOUT_CLOSE, "process"), (BREAK, "thread"), (INTERRUPTED, "process"), (SAVING, "thread")]
    with ThreadPoolExecutor(len(cases) if not context.is_tiny else 2) as pool:
        wrong = [what for what in pool.map(lambda case: _end(context, *case), cases) if what is not None]
    assert not wrong, "; ".join(wrong)


def _end(context: Context, how: str, executor: str) -> str | None:
    """Run one to its end; what is wrong with it."""
    name = f"{how}_{executor}"
    with tempfile.TemporaryDirectory(dir=context.work, ignore_cleanup_errors=True) as folder:
        checkpoints, errors = Path(folder) / "checkpoints", Path(folder) / "stderr"
        left_s = context.left_s()
        arguments = [how, executor, str(context.work), str(int(context.is_tiny)), str(checkpoints), str(left_s - 0.5)]
        with errors.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=said,
            )
        took_s, num_left = _watch(process, how, time.monotonic() + left_s)
        context.report.add(**{f"{name}_rc": process.returncode, f"{name}_end_s": took_s})
        text = errors.read_text(errors="replace")[-1200:]
        if took_s is None:
            return f"{name} has not ended in time: {text}"
        if num_left:
            return f"{name}: {num_left} processes were left running"
        if process.returncode not in (_CTRL_C if how == INTERRUPTED else (0,)):
            return f"{name}: exit code {process.returncode}: {text}"
        if how == SAVING and not (checkpoints / "step-0000000001" / "loaderkit-manifest.json").exists():
            return f"{name}: the checkpoint is not there: {text}"
    return None


def _watch(process: subprocess.Popen[bytes], how: str, until_s: float) -> tuple[float | None, int]:
    """Seconds from "ready" until its end, None for one that is killed as it has not ended; and how many of its processes
    outlived it."""
    assert process.stdout is not None
    with process.stdout as said, ThreadPoolExecutor(1) as pool:
        line = pool.submit(said.readline)
        try:
            line.result(until_s - time.monotonic())
            family = descendants(process.pid)
            if how == INTERRUPTED:
                process.send_signal(signal.SIGINT)
            begin_s = time.perf_counter()
            process.wait(until_s - time.monotonic())
        except (TimeoutError, subprocess.TimeoutExpired):
            process.kill()  # which ends the thread that reads, too
            process.wait()
            return None, 0
    took_s = time.perf_counter() - begin_s
    until_s = time.monotonic() + _FAREWELL_S
    while (alive := [pid for pid in family if _is_alive(pid)]) and time.monotonic() < until_s:
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
