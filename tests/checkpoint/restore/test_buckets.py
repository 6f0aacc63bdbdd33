"""Checkpoints in a bucket, and in tars in a bucket: equal to what lies on disk; and what faults do in mid-restore."""

from __future__ import annotations

import itertools
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from buckets import upload
from checkpoint_states import flat_states, pack, random_tensor, same, save_dcp
from fault_proxy import Fault, FaultProxy, Request
from hypothesis import HealthCheck, given, settings
from seaweed import Seaweed
from torch.distributed.checkpoint.state_dict_loader import load

import loaderkit
from loaderkit.checkpoint import StreamReader, latest, write_manifest
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import CheckpointError, ConnectorError, TemporaryError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.matrix(1)]
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def endpoint(seaweed: Seaweed, s3_keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))


def state() -> dict[str, torch.Tensor]:
    shapes = {"a": (700, 600), "b.large": (1500, 1600), "c": (3,), "d.empty": (0, 2), "e": (), "f": (400, 333)}
    return {name: random_tensor(torch.float32, shape, number) for number, (name, shape) in enumerate(shapes.items())}


def write(folder: Path, kind: str, tensors: dict[str, torch.Tensor]) -> None:
    """A checkpoint `folder`/c of one kind, and the same in the archive `folder`/c.tar."""
    path = folder / "c"
    if kind == "dcp":
        save_dcp(tensors, path)
    else:
        path.mkdir(parents=True)
        if kind == "torch":
            torch.save(tensors, path / "x.pt")
        else:
            safetensors.torch.save_file({n: t.contiguous().clone() for n, t in tensors.items()}, path / "x.safetensors")
    pack(sorted(path.iterdir()), folder, folder / "c.tar")


def restored_alike(url: str, tensors: dict[str, torch.Tensor]) -> None:
    restored = loaderkit.restore(url)
    assert set(restored) == set(tensors)
    assert [name for name, tensor in tensors.items() if not same(restored[name], tensor)] == []


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_the_same_from_a_bucket(seaweed: Seaweed, tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind, state())
    upload(seaweed, tmp_path, "restores", f"{kind}/")
    restored_alike(f"s3://restores/{kind}/c", state())
    restored_alike(f"s3://restores/{kind}/c.tar", state())
    into = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    loaderkit.restore(f"s3://restores/{kind}/c/", into, memory="64MiB")
    assert all(same(into[name], tensor) for name, tensor in state().items())
    write_manifest(f"s3://restores/{kind}/c")
    assert latest(f"s3://restores/{kind}", verify=True) == f"s3://restores/{kind}/c"
    if kind == "dcp":
        for url in ("c", "c.tar"):
            blank = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
            load(blank, storage_reader=StreamReader(f"s3://restores/dcp/{url}"), no_dist=True)
            assert all(same(blank[name], tensor) for name, tensor in state().items())


@given(flat_states())
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_any_state_is_the_same_from_a_bucket(seaweed: Seaweed, kind: str, state: dict[str, torch.Tensor]) -> None:
    tensors = {name: tensor for name, tensor in state.items() if name != "__metadata__"} | {"one": torch.ones(2)}
    prefix = f"{kind}-{next(NUMBERS)}"
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), kind, tensors)
        upload(seaweed, Path(folder), "any", f"{prefix}/")
        wanted = loaderkit.restore(f"{folder}/c")
    assert wanted.keys() == tensors.keys()
    restored_alike(f"s3://any/{prefix}/c", wanted)
    restored_alike(f"s3://any/{prefix}/c.tar", wanted)


# ---------------------------------------------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def uploaded(seaweed: Seaweed, tmp_path_factory: pytest.TempPathFactory) -> None:
    for kind in ("safetensors", "dcp"):
        folder = tmp_path_factory.mktemp(kind)
        write(folder, kind, state())
        write_manifest(folder / "c")
        upload(seaweed, folder, "faulty", f"{kind}/")
        (folder / f"c/{'loaderkit-manifest.json'}").unlink()
        upload(seaweed, folder / "c", "faulty", f"{kind}/plain/")


@pytest.fixture
def proxy(seaweed: Seaweed, uploaded: None) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed.port) as proxy:
        yield proxy


def is_body(request: Request) -> bool:
    """Whether a request is for the bytes of tensors: those for descriptions are short."""
    lo, _, hi = request.headers.get("range", "bytes=0-0").removeprefix("bytes=").partition("-")
    return request.method == "GET" and "list-type" not in request.path and int(hi or 0) - int(lo) > 2**16


def some(fault: Fault, numbers: range) -> Callable[[Request], Fault | None]:
    """The fault for those of the requests for tensors."""
    count, lock = itertools.count(), threading.Lock()

    def rule(request: Request) -> Fault | None:
        if not is_body(request):
            return None
        with lock:
            return fault if next(count) in numbers else None

    return rule


def restore(proxy: FaultProxy, what: str, into: dict[str, torch.Tensor], **more: Any) -> S3Connector:
    """Through the proxy, with little patience and in many requests."""
    retry = RetryArgs.model_validate({"total": "5s", "timeout": "1500ms"})
    args = S3Args.model_validate({"endpoint": proxy.endpoint, "connections": 4})
    connector = S3Connector("s3://faulty", args, retry)
    try:
        loaderkit.restore(f"shop://{what}", into, memory="32MiB", connectors={"shop": connector}, **more)
    finally:
        connector.close()
    return connector


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 9) for name, tensor in state().items()}


PASSING = {
    "latency": (Fault(wait_s=0.05), range(99)),
    "resets": (Fault(reset=True), range(0, 99, 5)),
    "a burst of 503": (Fault(answer=(503, "SlowDown")), range(2, 6)),
    "truncated bodies": (Fault(keep_bytes=5000), range(1, 99, 5)),
    "no answer": (Fault(hang=True), range(3, 4)),
    "an answer that never ends": (Fault(drip=True), range(4, 5)),
}


@pytest.mark.parametrize("what", PASSING)
@pytest.mark.parametrize(
    "kind", ["safetensors/c", *(pytest.param(kind, marks=pytest.mark.prove) for kind in ("dcp/c", "dcp/c.tar"))]
)
def test_what_passes_gives_the_right_bytes(proxy: FaultProxy, kind: str, what: str) -> None:
    into = blank()
    proxy.rule = some(*PASSING[what])
    restore(proxy, kind, into)
    assert all(same(into[name], tensor) for name, tensor in state().items())


LASTING = {
    "denied": Fault(answer=(403, "AccessDenied")),
    "expired": Fault(answer=(400, "ExpiredToken")),
    "throttled": Fault(answer=(503, "SlowDown")),
    "resets": Fault(reset=True),
    "truncated bodies": Fault(keep_bytes=5000),
    "silent": Fault(hang=True),
}


QUICK = ("denied", "resets")


@pytest.mark.parametrize("what", [w if w in QUICK else pytest.param(w, marks=pytest.mark.prove) for w in LASTING])
@pytest.mark.parametrize("num_good", [0, 6])
def test_what_lasts_is_one_clear_error(proxy: FaultProxy, what: str, num_good: int) -> None:
    into = blank()
    proxy.rule = some(LASTING[what], range(num_good, 10**9))
    with pytest.raises((CheckpointError, ConnectorError), match=r"s3://faulty/safetensors/c/x\.safetensors") as caught:
        restore(proxy, "safetensors/c", into)
    assert "SESSION-TOKEN" not in f"{caught.value!r}{caught.value.__cause__!r}"
    changed = {name for name, tensor in blank().items() if not same(into[name], tensor)}
    if num_good:
        assert isinstance(caught.value, CheckpointError)
        assert re.search(r"could not be read \(bytes \d+ to \d+ of s3", str(caught.value))
        assert isinstance(caught.value.__cause__, ConnectorError)
        assert changed <= set(caught.value.touched)
    else:  # while its description was read
        assert not changed


def test_the_store_goes_down_before_a_tensor_is_read(proxy: FaultProxy) -> None:
    into = blank()
    proxy.go_down()
    with pytest.raises(TemporaryError, match="s3://faulty/safetensors/c"):
        restore(proxy, "safetensors/c", into)
    proxy.come_up()
    assert all(same(into[name], tensor) for name, tensor in blank().items())


def test_flipped_bytes_are_found_with_a_manifest(proxy: FaultProxy) -> None:
    into = blank()
    proxy.rule = some(Fault(flip=2000), range(4, 6))
    restore(proxy, "safetensors/c", into, verify=True)
    assert all(same(into[name], tensor) for name, tensor in state().items())
    proxy.rule = some(Fault(flip=2000), range(4, 10**9))
    into = blank()
    with pytest.raises(
        CheckpointError, match=r"is damaged: bytes \d+ to \d+ of s3://faulty/safetensors/c/x.safetens"
    ) as caught:
        restore(proxy, "safetensors/c", into, verify=True)
    changed = {name for name, tensor in blank().items() if not same(into[name], tensor)}
    assert changed <= set(caught.value.touched)


def test_replaced_in_mid_restore(proxy: FaultProxy, seaweed: Seaweed) -> None:
    client = seaweed.boto()
    body = client.get_object(Bucket="faulty", Key="safetensors/plain/x.safetensors")["Body"].read()
    once = threading.Lock()

    def rule(request: Request) -> None:
        if is_body(request) and once.acquire(blocking=False):
            client.put_object(Bucket="faulty", Key="safetensors/plain/x.safetensors", Body=body[:-1] + b"\1")

    into = blank()
    proxy.rule = rule
    with pytest.raises(CheckpointError, match="was replaced since it was listed"):
        restore(proxy, "safetensors/plain", into)
