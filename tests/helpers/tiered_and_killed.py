"""A program that saves step 1 and uploads it, then saves another and dies in the middle of its upload.

`tiered_and_killed.py NEAR FAR STEP OPERATION`: FAR is a directory, or s3:// with the endpoint in AWS_ENDPOINT_URL. It kills
itself with -9 before the write operation number OPERATION on FAR after step 1, and prints "done" if there are fewer.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from crashing import Clock, Mortal
from tiered import state_of

import loaderkit
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import S3Args
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.s3 import S3Connector

NUM = 5_000_000  # numbers in the state: several parts of a file


class Deadly(Clock):
    """Kills the process before an operation; others run at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.kill_at: int | None = None

    def run(self, name: str, operation: Callable[[], Any]) -> Any:
        self.names.append(name)
        if len(self.names) - 1 == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation()


def far_store(url: str) -> Connector:
    if url.startswith("s3://"):
        return S3Connector(url, S3Args(endpoint=os.environ["AWS_ENDPOINT_URL"]))
    return FileConnector(url)


def main(near: str, far: str, step: int, operation: int) -> None:
    clock = Deadly()
    store = Mortal(far_store(far), clock)
    with loaderkit.CheckpointManager("far://", local=near, connectors={"far": store}) as checkpoints:
        checkpoints.save(1, state_of(1, NUM))
        checkpoints.wait_until_finished()
        clock.names.clear()
        clock.kill_at = operation
        checkpoints.save(step, state_of(7, NUM), force=True)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
