"""Shards in a bucket, on a full disk, and made on a Ray cluster."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from buckets import upload
from conftest import HELPERS, ROOT
from packed_shards import files_in, packed
from ray_clusters import ray_cluster
from seaweed import Seaweed

import loaderkit
from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.errors import StageError, WorkerDiedError
from loaderkit.pipeline.config.builder import to_config
from loaderkit.shards.planning import Options, plan_shards
from loaderkit.shards.run import PackProgress, Workers, pack_shards


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))


def calling(function: str, **arguments: Any) -> dict[str, Any]:
    return {"call": {"function": f"packed_shards:{function}", "args": arguments}}


def described(url: str, **source: Any) -> dict[str, Any]:
    return {
        "source": {"kind": "files", "url": url, "label": "parent", **source},
        "order": {"seed": 3},
        "stages": ["read", "decode", {"resize": {"size": [40, 48]}}, "random_horizontal_flip", {"batch": {"size": 8}}],
    }


class TestBucket:
    @pytest.fixture
    def s3(self, seaweed: Seaweed, photos: Path, s3_keys: None) -> dict[str, Any]:
        upload(seaweed, photos, "packing", "photos/")
        return {"endpoint": seaweed.endpoint}

    def objects(self, seaweed: Seaweed, prefix: str) -> dict[str, bytes]:
        client = seaweed.boto()
        listed = client.list_objects_v2(Bucket="packing", Prefix=prefix).get("Contents", [])
        keys = [found["Key"] for found in listed]
        assert not client.list_multipart_uploads(Bucket="packing", Prefix=prefix).get("Uploads")
        return {key.removeprefix(prefix): client.get_object(Bucket="packing", Key=key)["Body"].read() for key in keys}

    @pytest.mark.parametrize("form", ["tar", "array"])
    def test_from_a_bucket_into_it_the_same_bytes_as_on_disk(
        self, tmp_path: Path, seaweed: Seaweed, photos: Path, s3: dict[str, Any], rng: random.Random, form: str
    ) -> None:
        more = {"output": ["image"]} if form == "array" else {}
        place = f"packed-{form}-{rng.randrange(2**32)}/"
        packed(described(str(photos)) | more, tmp_path / "here", format=form, shard_bytes=30_000)
        result = packed(
            described("s3://packing/photos", s3=s3) | more, f"s3://packing/{place}", format=form, shard_bytes=30_000
        )
        there = self.objects(seaweed, place)
        assert there == files_in(tmp_path / "here")
        assert len(there) > (10 if form == "tar" else 1)
        with loaderkit.build(result.pipeline.to_dict()) as loader:
            num_samples = sum(len(batch["image"] if isinstance(batch, dict) else batch[0]) for batch in loader)
        assert num_samples == 60

    def test_what_was_cut_off_goes_on(
        self, tmp_path: Path, seaweed: Seaweed, photos: Path, s3: dict[str, Any], rng: random.Random
    ) -> None:
        """An error in mid-work: shards that are there stay, and the rest is made by the next run."""
        place = f"cut-off-{rng.randrange(2**32)}/"
        bad = described("s3://packing/photos", s3=s3)
        bad["stages"].insert(3, calling("refuse_once", path=str(tmp_path / "calls"), at=50))
        with pytest.raises(StageError, match=r"^shard \d of \d: call failed") as kept:
            packed(bad, f"s3://packing/{place}", shard_bytes=20_000)
        assert not [one for one in threading.enumerate() if one.name.startswith("loaderkit-samples")], kept.value
        assert f"{place}loaderkit-shards.json" not in self.objects(seaweed, place)
        result = packed(bad, f"s3://packing/{place}", shard_bytes=20_000)
        assert 0 < result.num_found < len(result.manifest["shards"])
        packed(bad, tmp_path / "here", shard_bytes=20_000)
        assert self.objects(seaweed, place) == files_in(tmp_path / "here")


@pytest.mark.prove
def test_a_full_disk_is_named_and_the_next_run_goes_on(tmp_path: Path, photos: Path) -> None:
    """Files of this program may have 20 kB: the third shard is larger."""
    (tmp_path / "p.yaml").write_text(to_yaml(described(str(photos), include="**/*.jpg")))
    program = (
        "import resource, sys; from packed_shards import packed\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, -1))\n"
        "packed('p.yaml', 'out', shard_bytes=20_000)"
    )
    environment = {"PYTHONPATH": f"{HELPERS}:{ROOT}", "LOADERKIT_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "shard 0 of " in last
    assert "File too large" in last
    names = {path.name for path in (tmp_path / "out").rglob("*")}
    assert names == {".loaderkit-shards", "plan.json"}
    packed(tmp_path / "p.yaml", tmp_path / "out", shard_bytes=20_000)
    packed(tmp_path / "p.yaml", tmp_path / "again", shard_bytes=20_000)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "again")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HELPERS}:{ROOT}")
        with ray_cluster(2) as started:
            yield started.address


@pytest.mark.integration
@pytest.mark.xdist_group("ray")
class TestRay:
    @pytest.mark.prove
    def test_tasks_write_the_same_bytes_though_one_dies(
        self, tmp_path: Path, photos: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They have the program's credentials; the cluster was begun without them."""
        monkeypatch.setenv("AWS_SESSION_TOKEN", "of this program")
        pipeline = described(str(photos))
        pipeline["stages"].insert(3, calling("need_variable", name="AWS_SESSION_TOKEN", value="of this program"))
        pipeline["stages"].insert(3, calling("signal_at", path=str(tmp_path / "calls"), at=60, name="SIGKILL"))
        result = packed(pipeline, tmp_path / "out", Workers(ray=True, ray_address=cluster), shard_bytes=30_000)
        assert result.manifest["num_samples"] == 60
        assert (tmp_path / "calls").stat().st_size > 60 + 16
        packed(pipeline, tmp_path / "here", shard_bytes=30_000)
        assert files_in(tmp_path / "out") == files_in(tmp_path / "here")

    def test_errors_come_back_as_they_are(self, tmp_path: Path, cluster: str) -> None:
        pipeline = {
            "source": {"kind": "dataset", "object": "packed_shards:hundred"},
            "order": {"shuffle": "none"},
            "stages": ["read", calling("refuse_some", every=79), {"batch": {"size": 1}}],
        }  # fmt: skip
        with pytest.raises(StageError, match=r"^shard 7 of 10: call failed for sample '78' in"):
            packed(pipeline, tmp_path / "out", Workers(ray=True, ray_address=cluster), shard_bytes=10_240)

    @pytest.mark.prove
    def test_one_that_always_dies_is_an_error(self, tmp_path: Path, cluster: str) -> None:
        pipeline = {
            "source": {"kind": "dataset", "object": "packed_shards:hundred"},
            "stages": ["read", calling("die_behind", position=90, path=str(tmp_path / "armed")), {"batch": {"size": 1}}],
            "order": {"shuffle": "none"},
        }  # fmt: skip
        (tmp_path / "armed").write_text("")
        with pytest.raises(WorkerDiedError, match="run it again, and it goes on"):
            packed(pipeline, tmp_path / "out", Workers(ray=True, ray_address=cluster), shard_bytes=30_000)
        (tmp_path / "armed").unlink()
        result = packed(pipeline, tmp_path / "out", shard_bytes=30_000)
        assert result.manifest["num_samples"] == 100


@pytest.mark.integration
@pytest.mark.prove
@pytest.mark.xdist_group("ray")
def test_a_node_that_is_lost_costs_nothing_but_time(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two nodes is taken away when the first shards are there; the other one makes its shards, too."""
    monkeypatch.setenv("PYTHONPATH", f"{HELPERS}:{ROOT}")
    pipeline = described(str(photos))
    with ray_cluster(1, nodes=2) as cluster:
        nodes = list(cluster.worker_nodes)

        def lose_one(progress: PackProgress) -> None:
            if progress.num_shards == 2 and len(nodes) == 2:
                cluster.remove_node(nodes.pop(), allow_graceful=False)

        plan = plan_shards(to_config(pipeline), Options(str(tmp_path / "out"), shard_bytes=12_000))
        with closing(plan.job.plan):
            result = pack_shards(plan, Workers(ray=True, ray_address=cluster.address), lose_one)
    assert len(nodes) == 1
    assert len(result.manifest["shards"]) > 8
    packed(pipeline, tmp_path / "here", shard_bytes=12_000)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "here")
