"""`prefetch.ray`: what is refused, and that ray is imported only where it is asked for. No cluster is needed."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from numbers_dataset import numbers

import loaderkit
from loaderkit._internal.packing import pack
from loaderkit.engine.metrics.stalls import WaitSegment
from loaderkit.engine.ray import cluster, surroundings
from loaderkit.engine.ray.actor_server import ActorServer
from loaderkit.engine.ray.clock_offset import batch_here, measure
from loaderkit.engine.ray.cluster import RaySettings
from loaderkit.engine.ray.messages import ActorSpec, PackedEngine
from loaderkit.engine.ray.object_memory import ObjectMemory
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.errors import ConfigError
from loaderkit.native.identity import identity
from loaderkit.sampling.shard import Shard

RAY = {"prefetch.executor": "ray"}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (RAY | {"prefetch.ray": {"cpus": 2}}, r"prefetch\.ray\.cpus.*num_cpus"),
        (RAY | {"prefetch.ray": {"num_cpus": 0}}, r"prefetch\.ray\.num_cpus"),
        (RAY | {"prefetch.ray": {"num_cpus": 0.00001}}, r"prefetch\.ray\.num_cpus.*0\.0001"),
        (RAY | {"prefetch.ray": {"resources": {"disk": 0.00001}}}, r"prefetch\.ray\.resources.*0\.0001"),
        (RAY | {"prefetch.ray": {"resources": {"CPU": 2}}}, r"prefetch\.ray\.resources.*CPUs are num_cpus"),
        (RAY | {"prefetch.ray": {"resources": {"GPU": 1}}}, r"prefetch\.ray\.resources.*cannot be asked for"),
        (RAY | {"prefetch.ray": {"strategy": "pack"}}, r"prefetch\.ray\.strategy"),
        (RAY | {"prefetch.ray": {"address": "ray://head:10001"}}, "Ray Client has no memory in common"),
        (RAY | {"prefetch.processes": 8}, "cannot be shared out to prefetch.processes: 8"),
    ],
)
def test_refused(overrides: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loaderkit.build(numbers(), overrides=overrides)


def test_settings_of_another_executor_do_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    with loaderkit.build(numbers(), overrides={"prefetch.ray": {"num_cpus": 2}}) as loader:
        assert len(list(loader)) == len(loader)
    assert "prefetch.ray is of no effect with prefetch.executor: auto" in caplog.text


def test_a_function_that_cannot_be_sent_is_refused_by_name() -> None:
    lock = threading.Lock()  # a lambda goes by value, and what it holds with it
    pipeline = numbers().call(lambda batch: lock and None)
    with pytest.raises(ConfigError, match=r"stages\.call\.function.*cannot be sent.*prefetch\.executor: ray"):
        loaderkit.build(pipeline, overrides=RAY)


_MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.52.0
    Python: 3.11.9
This process was started with:
    Ray: 2.60.0
"""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            ConnectionError("Could not find any running Ray instance.\nMore."),
            r"auto: there is no Ray cluster.*running Ray instance.*`ray start --head`.*local",
        ),
        (RuntimeError(_MISMATCH), r"Ray: 2\.52\.0 Python: 3\.11\.9 This.*Ray: 2\.60\.0\): install the same versions"),
        (RuntimeError("No node info found matching attributes: ''"), "this machine is none of its nodes .*`ray start"),
    ],
)
def test_no_connection(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with loaderkit.build(numbers(), overrides=RAY) as loader, pytest.raises(ConfigError, match=says):
        next(iter(loader))


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://head:10001", r"RAY_ADDRESS: ray://head:10001: Ray Client has no memory in common"),
        ("http://head:8265", r"RAY_ADDRESS: http://head:8265: expected HOST:PORT.*6379"),
    ],
)
def test_an_address_of_another_kind(monkeypatch: pytest.MonkeyPatch, address: str, says: str) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=says):
        cluster.connect("auto")


def test_another_program_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A web server, as Ray's dashboard has one."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ConfigError, match=r"another program answers there.*6379"):
            cluster.connect(f"127.0.0.1:{server.server_port}")


def test_a_program_that_is_connected_by_ray_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(ConfigError, match="ray:// address: Ray Client has no memory in common"):
        cluster.connect("auto")


def test_another_cluster_than_that_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        gcs_address = "127.0.0.1:6379"

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    for address in ("auto", "127.0.0.1:6379", "localhost:6379"):
        cluster.connect(address)
    for address in ("127.0.0.1:6380", "127.0.0.2:6379"):
        with pytest.raises(
            ConfigError, match=r"is connected to the cluster at 127\.0\.0\.1:6379, and a process has one"
        ):
            cluster.connect(address)


def test_ray_is_imported_only_where_it_is_asked_for() -> None:
    program = (
        "import sys, loaderkit\n"
        "from numbers_dataset import numbers\n"
        "for executor in ('thread', 'process'):\n"
        "    with loaderkit.build(numbers(), overrides={'prefetch.executor': executor}) as loader: list(loader)\n"
        "assert 'ray' not in sys.modules\n"
        "sys.modules['ray'] = None\n"
        "try: loaderkit.build(numbers(), overrides={'prefetch.executor': 'ray'})\n"
        "except loaderkit.errors.MissingExtraError as error: print(error)\n"
    )
    helpers = Path(__file__).parents[2] / "helpers"
    paths = f"import sys; sys.path[:0] = [{str(helpers)!r}]\n"
    ran = subprocess.run([sys.executable, "-c", paths + program], capture_output=True, text=True, check=True)
    assert "prefetch.executor: ray needs the package ray" in ran.stdout
    assert "pip install 'loaderkit[ray]'" in ran.stdout


def test_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials travel, what is the machine's own does not, and no text of them shows a value."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("HOSTNAME", "here")
    monkeypatch.chdir(tmp_path)
    sent = surroundings.Surroundings.here()
    assert sent.environment["AWS_SECRET_ACCESS_KEY"] == "hidden"
    assert "HOSTNAME" not in sent.environment
    assert sent.folder == str(tmp_path)
    assert "hidden" not in repr(sent) + str(sent)


def test_times_of_another_machine() -> None:
    now_s = 100.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    trips = iter([3.0, 1.0, 9.0, 2.0, 4.0])  # how long the answer takes on its way back

    def ask() -> float:
        nonlocal now_s
        theirs = now_s + 5000.0
        now_s += next(trips) - 1.0
        return theirs

    _, offset_s = measure(ask, clock)
    assert offset_s == pytest.approx(5000.0, abs=0.5)  # half of the shortest round trip
    segments = [WaitSegment(5101.0, 5102.0, "read"), WaitSegment(5102.0, 5103.0, None, (("read", 5102.0, 5102.5),))]
    batch = Delivered(0, 8, 8, "it", None, None, (), 0, False, False, None, None, 5103.0, segments)
    here = batch_here(batch, 5000.0)
    assert here.done_s == 103.0
    assert [(one.since_s, one.until_s) for one in here.segments] == [(101.0, 102.0), (102.0, 103.0)]
    assert here.segments[1].work == (("read", 102.0, 102.5),)


def test_memory_that_cannot_be_written_is_copied() -> None:
    """Of an object's memory only the mapping says whether it may be written to."""
    constant = np.frombuffer(b"x" * 100_000, np.uint8)  # the memory of a bytes object may be written to, all the same
    assert np.shares_memory(ObjectMemory().open(constant), constant)
    mapped = np.memmap(__file__, np.uint8, "r")
    opened = ObjectMemory().open(mapped)
    assert not np.shares_memory(opened, mapped)
    opened[:] = 0
    own = np.zeros(10, np.uint8)
    assert ObjectMemory().open(own) is own


def test_options() -> None:
    settings = RaySettings(num_cpus=2.0, resources={"fast_disk": 1.0}, strategy="default")
    options = settings.options()
    assert options["scheduling_strategy"] == "DEFAULT"
    assert (options["num_cpus"], options["resources"], options["max_restarts"]) == (2.0, {"fast_disk": 1.0}, 0)
    assert "runtime_env" not in options
    assert cluster.RaySettings().options()["resources"] is None


def test_the_wait_for_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is placement's only where what the actor asks for is not free."""
    node = {"Alive": True, "Resources": {"CPU": 8.0}}
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 6.0})
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: {"a": {"CPU": 6.0}})
    assert cluster.describe_wait(RaySettings(num_cpus=6.0)).endswith("so its process may be starting")
    assert cluster.describe_wait(RaySettings(num_cpus=7.0)) == (
        "ray: waits for 7 CPUs; the cluster has 8, of which 6 are free"
    )
    assert "no node has as many:" in cluster.describe_wait(RaySettings(num_cpus=9.0))
    halves = {"a": {"CPU": 3.0}, "b": {"CPU": 3.0}}
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: halves)
    assert cluster.describe_wait(RaySettings(num_cpus=6.0)).endswith("6 are free; no node has as many free")


class _Idle:
    """An engine that makes nothing."""

    def __init__(self, allocate: object, shard: Shard) -> None:
        pass

    def seek(self, epoch: int, position: int) -> None:
        pass


def test_a_command_that_fails_ends_the_wait_for_it() -> None:
    """The trainer asks for batches of after a seek, which fails in the actor."""
    packed = PackedEngine(np.frombuffer(pack(_Idle)[0], np.uint8), [], [])
    here, num_threads = surroundings.Surroundings.here(), torch.get_num_threads()
    spec = ActorSpec(here, "", (0, 1), num_threads, (0, 0), 0, logging.INFO, tuple(identity()))
    server = ActorServer(packed, spec)
    caught: list[BaseException] = []

    def take() -> None:
        try:
            server.next(1)
        except ArithmeticError as error:
            caught.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    error = ArithmeticError("no such place")
    server.fail(error)
    thread.join(60)
    assert caught == [error]
