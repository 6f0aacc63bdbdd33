"""An endpoint among processes: a port that is taken, forks, a loader that is forgotten; and what cannot be."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from scraping import Scrape, free_port, text_of
from waiting import LIMIT_S, wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit._internal.system.local_rank import local_rank
from loaderkit.errors import ConfigError, MissingExtraError
from loaderkit.metrics.address import ListenAddress, parse_address

LISTENER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def pipeline_of(port: Any) -> Pipeline:
    return Pipeline.dataset(list(range(20))).read().batch(5).metrics(prometheus=port)


def test_a_port_that_is_taken_is_a_warning_that_names_who_has_it(caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        with loaderkit.build(pipeline_of(port)) as loader:
            assert len(list(loader)) == 4
        (message,) = caplog.messages
        assert (
            f"training goes on without metrics: metrics.prometheus: 127.0.0.1:{port} is taken by process {other.pid} ("
            in message
        )
        assert sys.executable in message
        other.communicate()


def test_a_port_that_this_program_has_taken(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        loader = loaderkit.build(pipeline_of(port))
    assert "by this program itself, not by loaderkit" in caplog.text
    with loader, loaderkit.build(pipeline_of(port)):  # it is free now: both are shown
        assert Scrape(port).by("pipeline", "batches_total").keys() == {"pipeline", "pipeline-2"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (0, "a port from 1 to 65535"),
        (65536, "a port from 1 to 65535"),
        (True, "a port from 1 to 65535"),
        ("localhost", "HOST:PORT"),
        ("http://localhost:80", "HOST:PORT"),
        ("::1:9431", "HOST:PORT"),
        ("192.0.2.1:9431", "192.0.2.1:9431 cannot be listened on: Cannot assign requested address"),
        ("no-such-host.invalid:9431", "cannot be listened on"),
    ],
)
def test_addresses_that_cannot_be(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.prometheus") as caught:
        loaderkit.build(pipeline_of(given))
    assert words in str(caught.value)


def test_addresses() -> None:
    assert parse_address(9431) == parse_address("9431") == ListenAddress("127.0.0.1", 9431)
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address("node-7.cluster:9431") == ("node-7.cluster", 9431)
    assert parse_address("[::]:9431") == ("::", 9431)
    assert str(parse_address("[::]:9431")) == "[::]:9431"
    assert local_rank({}) == local_rank({"LOCAL_RANK": ""}) == 0
    assert local_rank({"LOCAL_RANK": "3", "SLURM_LOCALID": "0"}) == 3
    assert local_rank({"SLURM_LOCALID": "2"}) == 2


def test_a_local_rank_beyond_the_last_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    with pytest.raises(ConfigError, match="LOCAL_RANK 7 make port 65537"):
        loaderkit.build(pipeline_of(65530))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'loaderkit\[metrics\]'"):
        loaderkit.build(pipeline_of(free_port()))


def test_a_checkpoint_has_no_batches(tmp_path: Path) -> None:
    pipeline = {
        "source": {"kind": "checkpoint", "url": str(tmp_path)},
        "stages": ["read"],
        "metrics": {"prometheus": 9431},
    }
    with pytest.raises(ConfigError, match=r"metrics\.prometheus: there are metrics of batches"):
        loaderkit.build(pipeline)


def test_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "source: {kind: dataset, object: 'builtins:list'}\n"
        "stages: [read, {batch: {size: 2}}]\n"
        'metrics: {prometheus: "${P:-9431}"}\n'
    )
    assert Pipeline.from_yaml(path).config.metrics.prometheus == 9431
    assert Pipeline.from_yaml(path, {"metrics.prometheus": None}).config.metrics.prometheus is None
    named = Pipeline.from_yaml(path, {"metrics.prometheus": "[::]:80"})
    assert named.to_yaml().endswith("metrics: {prometheus: '[::]:80'}\n")


def test_a_loader_that_is_forgotten_leaves() -> None:
    port, before = free_port(), {*threading.enumerate()}
    loader = loaderkit.build(pipeline_of(port))
    next(iter(loader))
    assert Scrape(port)("batches_total") == 1
    del loader
    gc.collect()
    for thread in {
        thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
    } - before:
        thread.join(LIMIT_S)
    wait_for(lambda: not _listens(port))


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_fork_has_its_own_endpoint(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As with `ddp_fork` of Lightning: the loader is made before the fork, and a rank of its own loads with it."""
    port = free_port()
    loader = loaderkit.build(pipeline_of(port))
    to_child, from_child = socket.socketpair(), socket.socketpair()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.environ["LOCAL_RANK"] = "1"
            next(iter(loader))
            from_child[1].sendall(b"1" if Scrape(port + 1)("batches_total") == 1 else b"0")
            to_child[1].recv(1)
            loader.close()
            code = 0 if not _listens(port + 1) else 2
        finally:
            os._exit(code)
    assert from_child[0].recv(1) == b"1"
    assert Scrape(port)("batches_total") == 0
    loader.close()
    assert not _listens(port)  # the child does not hold it
    with loaderkit.build(pipeline_of(port)):
        assert Scrape(port)("batches_total") == 0
    to_child[0].sendall(b"1")
    assert os.waitpid(child, 0)[1] == 0
    for one in (*to_child, *from_child):
        one.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_names_and_labels_of_any_text() -> None:
    port = free_port()
    name = 'a "b" \\ \n ü'
    with loaderkit.build(pipeline_of(port).named(name)):
        assert Scrape(port)("batches_total", pipeline=name) == 0
        assert "loaderkit_batches_total" in text_of(port, "text/plain")
