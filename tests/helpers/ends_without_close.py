"""A program that ends without `close` before its only save is written.

`ends_without_close.py TO FLUSH [LOCAL] [--fails]`: TO is a directory or a URL, s3:// with the endpoint in AWS_ENDPOINT_URL.
The save is held until the main thread has ended, and from then on no thread can be begun, on any Python. `--fails`: the
directory is a file by then.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tiered import state_of
from tiered_and_killed import NUM, far_store

import loaderkit
from loaderkit.checkpoint.manager.saving import Saving

start, run = threading.Thread.start, Saving._run


def start_unless_ending(thread: threading.Thread) -> None:
    """What Python 3.12 does, also on others."""
    if not threading.main_thread().is_alive():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    start(thread)


def run_late(saving: Saving) -> None:
    threading.main_thread().join()
    run(saving)


def main(to: str, flush: str, *local: str) -> None:
    is_s3 = to.startswith("s3://")
    checkpoints = loaderkit.CheckpointManager(
        "far://" if is_s3 else to,
        local=local[0] if local else None,
        flush=flush,
        connectors={"far": far_store(to)} if is_s3 else None,
    )
    checkpoints.save(1, state_of(7, NUM))


if __name__ == "__main__":
    threading.Thread.start = start_unless_ending  # type: ignore[assignment,method-assign]
    Saving._run = run_late  # type: ignore[assignment,method-assign]
    main(*(argument for argument in sys.argv[1:] if argument != "--fails"))
    if "--fails" in sys.argv:
        Path(sys.argv[1]).rmdir()
        Path(sys.argv[1]).touch()
