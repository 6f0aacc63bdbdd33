"""Checkpoints saved to stores that do not rename directories: a bucket, and a filesystem of fsspec."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from crashing import names_in, number_in, save_to
from safetensors.torch import load
from seaweed import Seaweed
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit.checkpoint import StreamWriter, latest
from loaderkit.connectors.base import Connector
from loaderkit.connectors.config import S3Args
from loaderkit.connectors.fsspec import FsspecConnector
from loaderkit.connectors.s3 import S3Connector

pytestmark = pytest.mark.filterwarnings("ignore")
NUMBERS = itertools.count()
BUCKET = "saves"


@pytest.fixture(params=["s3", "fsspec"])
def store(request: pytest.FixtureRequest, seaweed: Seaweed, s3_keys: None) -> Iterator[Connector]:
    if request.param == "fsspec":
        connector: Connector = FsspecConnector(f"memory://saves-{next(NUMBERS)}")
    else:
        if BUCKET not in [bucket["Name"] for bucket in seaweed.boto().list_buckets()["Buckets"]]:
            seaweed.boto().create_bucket(Bucket=BUCKET)
        connector = S3Connector(f"s3://{BUCKET}/{next(NUMBERS)}/", S3Args(endpoint=seaweed.endpoint))
    yield connector
    connector.close()


def test_safetensors_saved_again_and_read_by_its_own_program(store: Connector) -> None:
    for number in range(3):
        state = {"model": {"w": torch.full((300, 7), float(number))}, "step": number}
        writer = StreamWriter("given://step-1", format="safetensors", connectors={"given": store})
        save(state, storage_writer=writer, no_dist=True)
        found = loaderkit.restore("given://step-1", connectors={"given": store}, verify=True)
        assert (found["step"], found["model.w"].eq(number).all()) == (number, True)
        (key,) = (name for name in names_in(store) if name.endswith(".safetensors"))
        data = bytearray(store.stat(key).size)
        store.read_into(key, 0, memoryview(data))
        assert load(bytes(data))["w"].eq(number).all()
        others = {
            "loaderkit-manifest.json",
            "loaderkit-state.json",
            *(["model.safetensors.index.json"] if number else []),
        }
        assert {*names_in(store)} == {key, *(f"step-1/{name}" for name in others)}


def files(step: str, generation: int) -> list[str]:
    return [f"{step}/{name}" for name in (".metadata", f"__0_{generation}.distcp", "loaderkit-manifest.json")]


def test_saved_saved_again_and_found(store: Connector) -> None:
    for number in range(3):
        save_to(store, "step-1", number)
        assert number_in(store, "step-1", verify=True) == number
        assert names_in(store) == files("step-1", number)
    save_to(store, "step-2", 7)
    assert latest("given://", connectors={"given": store}).endswith("step-2")
    assert names_in(store) == files("step-1", 2) + files("step-2", 0)
