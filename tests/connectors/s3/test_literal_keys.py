"""Keys as AWS has them and most file systems have not."""

from __future__ import annotations

from pathlib import Path

import pytest
from literal_bucket import literal_bucket
from seaweed import Seaweed

import loaderkit
from loaderkit.connectors.config import RetryArgs, S3Args
from loaderkit.connectors.s3 import S3Connector
from loaderkit.errors import ConnectorError

pytestmark = pytest.mark.usefixtures("s3_keys")


@pytest.mark.parametrize("listing", ["fresh", "1d"])
def test_empty_parts_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str) -> None:
    """Also at the second start, which takes the listing that the first has kept."""
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path))
    objects = {f"p/{key}": key.encode() for key in ("a//b.txt", "a/b.txt", "/c.txt", "d///e.txt")}
    with literal_bucket(objects) as endpoint:
        source = {"kind": "files", "url": "s3://bucket/p", "listing": listing, "s3": {"endpoint": endpoint}}
        for _ in range(3):
            with loaderkit.build({"source": source, "stages": ["read", {"batch": {"size": 9}}]}) as loader:
                (batch,) = loader
                assert sorted(batch["txt"]) == sorted(objects.values())


def test_a_store_that_lists_other_keys_than_it_is_asked_for(seaweed: Seaweed) -> None:
    """SeaweedFS takes "//" for "/". Cut to size such a key would be that of another object."""
    seaweed.make_bucket("slashes")
    seaweed.boto().put_object(Bucket="slashes", Key="p/ab", Body=b"x")
    connector = S3Connector("s3://slashes//p", S3Args(endpoint=seaweed.endpoint), RetryArgs(total=5))
    with pytest.raises(ConnectorError, match=r"lists 'p/ab' there.*a slash too many"):
        list(connector.list(""))
    connector.close()
