"""Checkpoints saved to stores that do not rename directories: a bucket, and a filesystem of fsspec."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from crashing import names_in, number_in, save_to
from seaweed import Seaweed

from loaderkit.checkpoint import latest
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
