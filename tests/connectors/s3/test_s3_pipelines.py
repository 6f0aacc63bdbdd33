"""One pipeline over files, over tar, over a bucket and over tar in a bucket gives the same batches to the last byte, whatever
the cache holds; and what it asks of the store is what it should."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from buckets import epoch_of, upload
from fault_proxy import FaultProxy
from seaweed import Seaweed

import loaderkit
from loaderkit.cli import main
from loaderkit.pipeline.config.builder import to_config
from loaderkit.pipeline.execution_plan import compile_pipeline

BLOCKS = {"shuffle": "block", "seed": 1, "block": {"block": "20KiB", "window": 3, "lanes": 2}}
ORDERS: dict[str, dict[str, Any]] = {
    "global": {"shuffle": "global", "seed": 3},
    "none": {"shuffle": "none"},
    "block": BLOCKS,
}


@pytest.fixture(scope="module")
def uploaded(seaweed: Seaweed, photos: Path, shards: Path) -> str:
    upload(seaweed, photos, "pipelines", "photos/")
    upload(seaweed, shards, "pipelines", "shards/")
    return seaweed.endpoint


@pytest.fixture(autouse=True)
def _indexes(tmp_path: Path, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))


def files(url: Path | str, **more: Any) -> dict[str, Any]:
    return {"kind": "files", "url": str(url), "include": "**/*.jpg", "label": "parent", **more}


def tars(url: Path | str, **more: Any) -> dict[str, Any]:
    return {"kind": "tar", "url": str(url), "fields": {"image": "jpg", "label": "cls"}, **more}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.matrix(1)
def test_the_same_bytes_from_everywhere(order: str, uploaded: str, photos: Path, shards: Path, tmp_path: Path) -> None:
    s3 = {"endpoint": uploaded}
    cache = {"dir": str(tmp_path / "cache")}
    in_files, _ = epoch_of(files(photos), ORDERS[order])
    in_tars, _ = epoch_of(tars(shards), ORDERS[order])
    assert epoch_of(files("s3://pipelines/photos", s3=s3), ORDERS[order])[0] == in_files
    assert epoch_of(tars("s3://pipelines/shards", s3=s3), ORDERS[order])[0] == in_tars
    for wanted, source in (
        (in_files, files("s3://pipelines/photos", s3=s3, cache=cache)),
        (in_tars, tars("s3://pipelines/shards", s3=s3, cache=cache)),
    ):
        cold, store = epoch_of(source, ORDERS[order])
        assert store["cache_missed_bytes"] > 0
        warm, store = epoch_of(source, ORDERS[order])
        # A sample may be read by itself here and with its neighbours there.
        assert store["cache_hit_rate"] > 0.95
        assert store["fetched_bytes"] < 0.05 * store["cache_hit_bytes"]
        kept = sorted(Path(cache["dir"]).glob("objects/*/*"))
        for path in kept[::2]:
            path.unlink()
        half, store = epoch_of(source, ORDERS[order])
        assert 0 < store["cache_hit_rate"] < 1
        for number, path in enumerate(sorted(Path(cache["dir"]).glob("objects/*/*"))):
            content = bytearray(path.read_bytes())
            content[number % len(content)] ^= 1
            path.write_bytes(content)
        damaged, store = epoch_of(source, ORDERS[order])
        assert store["num_cache_damaged"] > 0
        assert cold == warm == half == damaged == wanted
        shutil.rmtree(cache["dir"])
    tiny = {**cache, "size": 50_000}
    assert epoch_of(tars("s3://pipelines/shards", s3=s3, cache=tiny), ORDERS[order])[0] == in_tars


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_executors(executor: str, uploaded: str, shards: Path, tmp_path: Path) -> None:
    source = tars("s3://pipelines/shards", s3={"endpoint": uploaded}, cache={"dir": str(tmp_path / "cache")})
    found, store = epoch_of(source, BLOCKS, executor=executor)
    assert found == epoch_of(tars(shards), BLOCKS)[0]
    assert store["cache_hit_bytes"] > 0, "what indexed the shards left them there"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("kind", ["files", "tar"])
def test_several_processes_read_ahead_each_its_own(kind: str, uploaded: str, photos: Path, shards: Path) -> None:
    s3 = {"endpoint": uploaded}
    order = BLOCKS if kind == "tar" else ORDERS["global"]
    near = tars(shards) if kind == "tar" else files(photos)
    far = tars("s3://pipelines/shards", s3=s3) if kind == "tar" else files("s3://pipelines/photos", s3=s3)
    found, store = epoch_of(far, {**order, "epochs": 1}, executor="process", processes=2, batches=4)
    assert found == epoch_of(near, order)[0]
    assert store["ahead_bytes"] > 0.8 * store["direct_bytes"]
    objects = shards.glob("*.tar") if kind == "tar" else photos.rglob("*.jpg")
    sizes = sum(path.stat().st_size for path in objects)
    assert store["ahead_bytes"] + store["direct_bytes"] < 1.7 * sizes  # neither has what only the other one wants


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_get_their_share_and_read_little_more(
    uploaded: str, shards: Path, seaweed: Seaweed, world_size: int
) -> None:
    def keys(url: str, rank: int, **more: Any) -> tuple[list[str], dict[str, Any]]:
        pipeline = {
            "source": tars(url, limit=56, **more),
            "order": {**BLOCKS, "epochs": 1},
            "stages": ["read", {"batch": {"size": 4}}],
        }
        with loaderkit.build(pipeline, rank=rank, world_size=world_size) as loader:
            found = [key for batch in loader for key in batch["__key__"]]
            return found, loader.stats().to_dict()["store"]

    sizes = sum(path.stat().st_size for path in shards.glob("*.tar"))
    fetched = 0
    with FaultProxy(seaweed.port) as proxy:
        for rank in range(world_size):
            found, store = keys("s3://pipelines/shards", rank, s3={"endpoint": proxy.endpoint})
            assert found == keys(str(shards), rank)[0]
            fetched += store["ahead_bytes"] + store["direct_bytes"]
    # Ranks that divide the lanes do not read one another's blocks, but for what evens out the lanes' ends.
    assert fetched <= (1.35 if world_size < 3 else 3) * sizes


def test_a_block_is_one_request(uploaded: str, shards: Path, seaweed: Seaweed) -> None:
    with FaultProxy(seaweed.port) as proxy:
        pipeline = {
            "source": tars("s3://pipelines/shards", s3={"endpoint": proxy.endpoint, "md5": False}),
            "order": {**BLOCKS, "epochs": 1},
            "stages": ["read", {"batch": {"size": 4}}],
        }
        with loaderkit.build(pipeline) as loader:
            num_before = len(proxy.requests)
            assert sum(len(batch["__key__"]) for batch in loader) == 60
            store = loader.stats().to_dict()["store"]
    sent = [request for request in proxy.requests[num_before:] if request.method == "GET"]
    plan = compile_pipeline(to_config({**pipeline, "source": tars(shards)}))
    num_blocks = len(plan.source.blocks(20 * 1024)) - 1
    plan.close()
    # Each block, two fields of the first sample to know what batches look like, and a few of the ends of lanes.
    assert num_blocks <= len(sent) <= num_blocks + 8
    assert 0 < store["over_read_bytes"] < 0.5 * store["fetched_bytes"]  # the members' headers


def test_indexes_beside_shards_in_a_bucket(
    seaweed: Seaweed, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(seaweed, shards, "indexes", "d/")
    url = "s3://indexes/d/"
    with FaultProxy(seaweed.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert main(["index", "--check", f"{url}*.tar"]) == 1
        assert "there is no index (s3://indexes/d/shard-000.idx)" in capsys.readouterr().err
        assert main(["index", f"{url}shard-{{000..001}}.tar", f"{url}*2.tar"]) == 0
        assert main(["index", "--check", f"{url}*.tar"]) == 0
        assert "s3://indexes/d/shard-002.idx: ok, 20 samples, 40 members" in capsys.readouterr().out
        assert main(["index", f"{url}nothing-*.tar"]) == 1
        assert main(["index", f"{url}nothing.tar"]) == 1
        assert "no such object" in capsys.readouterr().err
        del proxy.requests[:]
        wanted = epoch_of(tars(shards), BLOCKS)[0]
        assert epoch_of(tars(url), BLOCKS)[0] == wanted
        assert any(request.path.endswith("shard-002.idx") for request in proxy.requests)
        assert not [request for request in proxy.requests if "idx" not in request.path and request.method == "PUT"]
        # Kept here, they cost nothing at the next start, however many shards there are.
        del proxy.requests[:]
        loaderkit.build({"source": tars(url), "stages": ["read", {"batch": {"size": 4}}]}).close()
        assert ["list-type" in request.path for request in proxy.requests] == [True]
        Path(tmp_path / "indexes" / "tar-index").rename(tmp_path / "gone")
        cache = {"dir": str(tmp_path / "cache")}
        assert epoch_of(tars(url, cache=cache), BLOCKS)[0] == wanted


def test_resuming_reads_what_follows(uploaded: str, shards: Path) -> None:
    pipeline = {
        "source": tars("s3://pipelines/shards", s3={"endpoint": uploaded}),
        "order": BLOCKS,
        "stages": ["read", {"batch": {"size": 4}}],
    }
    with loaderkit.build(pipeline) as loader:
        batches = iter(loader)
        begun = [next(batches)["__key__"] for _ in range(5)]
        state = loader.state_dict()
        rest = [batch["__key__"] for batch in batches]
        second = [batch["__key__"] for batch in loader]
    with loaderkit.build(pipeline) as loader:
        loader.load_state_dict(state)
        assert [batch["__key__"] for batch in loader] == rest
        assert [batch["__key__"] for batch in loader] == second
        for _ in loader:
            break  # and the epoch after that is dropped
        loader.set_epoch(0)
        assert [batch["__key__"] for batch in loader] == begun + rest


def test_records_of_an_array(uploaded: str, seaweed: Seaweed, tmp_path: Path) -> None:
    import numpy as np

    numbers = np.random.default_rng(0).integers(0, 2**16, (5000, 8)).astype(np.uint16)
    np.save(tmp_path / "numbers.npy", numbers)
    upload(seaweed, tmp_path, "arrays")
    for order in ({"shuffle": "none"}, {"shuffle": "block", "block": {"block": "8KiB", "window": 2, "lanes": 2}}):
        found = []
        for source in (
            {"kind": "array", "url": str(tmp_path / "numbers.npy")},
            {"kind": "array", "url": "s3://arrays/numbers.npy", "s3": {"endpoint": uploaded}},
        ):
            pipeline = {"source": source, "order": order, "stages": ["read", {"batch": {"size": 500}}]}
            with loaderkit.build(pipeline) as loader:
                found.append([batch["data"].numpy().tobytes() for batch in loader])
                store = loader.stats().to_dict()["store"]
        assert found[0] == found[1]
        assert store["num_requests"] < 120  # 5,000 records
