"""A program that ends without `close` before its last save is written: that is completed, or its failure is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
from conftest import HELPERS
from seaweed import Seaweed
from tiered import Two, number_in, state_of, steps_in
from tiered_and_killed import NUM, far_store
from waiting import wait_for

import loaderkit


def ended(*arguments: object, endpoint: str = "") -> str:
    """What such a program prints to stderr; it ends orderly."""
    program = [sys.executable, str(HELPERS / "ends_without_close.py"), *map(str, arguments)]
    environment = os.environ | {"AWS_ENDPOINT_URL": endpoint}
    done = subprocess.run(program, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_it_is_completed(flush: str, tmp_path: Path) -> None:
    """By a process that could not be started any more, too."""
    assert not ended(tmp_path, flush)
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        assert number_in(checkpoints, 1, NUM) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]


@pytest.mark.prove
def test_in_a_store_whose_calls_have_threads(tmp_path: Path) -> None:
    assert not ended(f"fsspec+file://{tmp_path}", "thread")
    with loaderkit.CheckpointManager(tmp_path) as checkpoints:
        assert number_in(checkpoints, 1, NUM) == 7


@pytest.mark.prove
def test_in_s3(seaweed: Seaweed, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seaweed.boto().create_bucket(Bucket="ends-without-close")
    assert not ended("s3://ends-without-close/runs", "thread", endpoint=seaweed.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    store = far_store("s3://ends-without-close/runs")
    with loaderkit.CheckpointManager("far://", connectors={"far": store}) as checkpoints:
        assert number_in(checkpoints, 1, NUM) == 7
    store.close()


@pytest.mark.prove
def test_its_upload_is_left_to_the_next_run(tmp_path: Path) -> None:
    assert "the next run goes on with the upload" in ended(tmp_path / "far", "thread", tmp_path / "near")
    assert not list((tmp_path / "far").glob("step-*"))
    with loaderkit.CheckpointManager(tmp_path / "far", local=tmp_path / "near"):
        pass
    with loaderkit.CheckpointManager(tmp_path / "far") as checkpoints:
        assert number_in(checkpoints, 1, NUM) == 7


def test_its_failure_is_said(tmp_path: Path) -> None:
    said = ended(tmp_path / "to", "thread", "--fails")
    assert "the save of step 1 has failed, and the program has ended without `close`" in said
    assert str(tmp_path / "to") in said


def interrupt_the_wait() -> None:
    """Ctrl-C, once the main thread waits in `wait_until_finished`."""
    main = threading.main_thread().ident
    assert main is not None

    def waits() -> bool:
        names = [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        return names[0] in ("wait", "_wait_for_tstate_lock") and "wait_until_finished" in names

    wait_for(waits)
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("local", [False, True])
def test_ctrl_c_while_it_is_waited_for(local: bool) -> None:
    """A save, or an upload: another wait is one, and it is completed. Python 3.11 takes the thread for ended."""
    two = Two()
    two.far.hold()
    checkpoints = two.manager() if local else loaderkit.CheckpointManager("far://", connectors=two.connectors)
    saving = checkpoints.save(1, state_of(1))
    assert saving is not None
    assert two.far.begun.wait(60)
    if local:
        saving.wait(60)
    interrupts = threading.Thread(target=interrupt_the_wait)
    interrupts.start()
    with pytest.raises(KeyboardInterrupt):
        checkpoints.wait_until_finished()
    interrupts.join()
    assert saving.is_done == local
    two.far.gate.set()
    checkpoints.close()
    assert saving.is_committed
    assert steps_in(two.far) == [1]
