"""python -m loops LOOP FOLDER STOP SIGNALLED: all runs of a loop, which write what they train into the folder.

Its ranks save after step STOP, and in another run get SIGTERM in step SIGNALLED.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loops.common import Rank, Run, loss_of, make_model, make_optimizer

BROKEN = 70


def runs_of(stop: int, signalled: int) -> list[Run]:
    """In their order: the first saves what three resume."""
    resumed = [
        Run(name=f"at-{n}", num_ranks=n, resumes=True, resumes_at=stop, checkpoints="stopped") for n in (2, 1, 4)
    ]
    return [
        Run(name="whole", num_ranks=2, saves_at=stop, checkpoints="stopped", logs=True),
        *resumed,
        Run(name="signalled", num_ranks=2, saves_at=stop, signalled_at=signalled, checkpoints="signalled"),
        Run(name="after", num_ranks=2, resumes=True, checkpoints="signalled"),
    ]


def fork_ranks(train: Any, run: Run, folder: Path) -> None:
    """Train in forks of this process, which are a process group. Raises RuntimeError if one fails."""
    pids: list[int] = []
    for number in range(run.num_ranks):
        pid = os.fork()
        if not pid:
            os.setpgid(0, pids[0] if pids else 0)
            os._exit(train_as(train, Rank(run=run, number=number, folder=folder)))
        pids.append(pid)
        os.setpgid(pid, pids[0])
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if BROKEN in codes or (any(codes) and run.signalled_at is None):
        raise RuntimeError(f"{run.name}: exit codes {codes}")


def train_as(train: Any, rank: Rank) -> int:
    """The exit code of a rank. Its environment is that of torchrun's."""
    number, num_ranks = str(rank.number), str(rank.run.num_ranks)
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    try:
        rank.begin_group()
        train(rank)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except BaseException:
        traceback.print_exc()
        return BROKEN
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def import_all(folder: Path) -> None:
    """What ranks import late, once for all of them: 3 s of CPU each. No thread is left behind."""
    with Rank(run=Run(name="imports", num_ranks=1, checkpoints="none"), number=0, folder=folder).loader() as loader:
        for batch in loader:
            loss_of(make_model(), batch)
    make_optimizer(make_model())
    for module in ("loaderkit.checkpoint.manager.manager", "loaderkit.checkpoint.restore.api", "loaderkit.metrics"):
        importlib.import_module(module)


def main(name: str, folder: Path, stop: int, signalled: int) -> None:
    loop: Any = importlib.import_module(f"loops.{name}")
    torch.set_num_threads(1)
    import_all(folder)
    begin = getattr(loop, "run_ranks", partial(fork_ranks, loop.train))
    for run in runs_of(stop, signalled):
        begin(run, folder)
    (folder / "logged.json").write_text(json.dumps(loop.logged(folder / "logs")))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
