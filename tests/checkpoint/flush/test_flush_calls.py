"""Calls of a function in another process."""

from __future__ import annotations

import os

import flush_stores
import pytest
import torch
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here

from loaderkit._internal.system.child_process import ChildProcess
from loaderkit.checkpoint.flush.process import FlushProcess
from loaderkit.checkpoint.flush.shared_pages import SharedPages
from loaderkit.checkpoint.save.staging import HostCopies


def test_it_ends_though_a_fork_holds_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, and another call starts another one."""
    memory = SharedPages()
    process, copies = FlushProcess(flush_stores.add, memory), HostCopies(memory.allocate)
    assert process.call(copies.copy({"w": torch.arange(4.0)}), 0.5) == 6.5
    (first,) = flush_stores.children()
    ours, theirs = os.pipe()
    fork = os.fork()
    if not fork:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    with monkeypatch.context() as patched:
        patched.setattr(ChildProcess, "kill", lambda self: pytest.fail("it did not end by itself"))
        process.close()
    assert flush_stores.children() == []
    os.close(theirs)
    os.close(ours)
    os.waitpid(fork, 0)
    assert process.call(copies.copy({"w": torch.ones(9)}), 1.0) == 10
    assert flush_stores.children() != [first]
    process.close()
