"""Lines and records in whole pipelines: executors, restarts, ranks, mixtures, `filter`, `pack`, stores, commands."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import upload
from seaweed import Seaweed
from tf_records import example, record
from token_files import tokenized

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main
from loaderkit.connectors.base import Connector, ObjectInfo
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.sources.serial import files, lines, offsets_file, tfrecord
from loaderkit.sources.serial.offsets import Offsets

NUM = 45
Make = Callable[..., Pipeline]


@pytest.fixture(params=["json", "text", "tfrecord"])
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that begins a pipeline of 45 samples {"text": "<number> ..."} in three files; file number 2 is empty."""
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    texts = [f"{number} " + "é" * (number * 7 % 30) for number in range(NUM)]
    for number, some in enumerate((texts[:20], [], texts[20:])):
        (folder / f"{number}.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in some))
        (folder / f"{number}.txt").write_text("\r\n".join(some), newline="")
        data = b"".join(record(example({"text": [text.encode()]})) for text in some)
        (folder / f"{number}.tfrecord").write_bytes(data)

    def begin(url: Any = folder, **args: Any) -> Pipeline:
        if request.param == "tfrecord":
            return Pipeline.tfrecord(url, **args)
        return Pipeline.lines(url, format=request.param, **args)

    return begin


def number_of(text: str | bytes) -> int:
    return int(text.split()[0])


def numbers_of(loader: loaderkit.Loader) -> list[int]:
    return [number_of(text) for batch in loader for text in batch["text"]]


def is_even(sample: dict[str, Any]) -> bool:
    return number_of(sample["text"]) % 2 == 0


def as_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    text = sample["text"]
    return tokenized({"text": text.encode() if isinstance(text, str) else text})


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_executors(make: Make, executor: str) -> None:
    orders = []
    for more in ({"executor": "inline"}, {"executor": executor, "concurrency": 3}):
        pipeline = (
            make().shuffle("block", seed=3, block=300, window=2, lanes=2).read().batch(4).prefetch(**more).epochs(2)
        )
        with loaderkit.build(pipeline) as loader:
            assert loader.num_samples == NUM
            orders.append([numbers_of(loader), numbers_of(loader)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == [*range(NUM)]


def test_resumes_at_another_world_size(make: Make) -> None:
    pipeline = make().shuffle(seed=5).read().batch(3, drop_last=True).prefetch(executor="inline").epochs(1)
    with loaderkit.build(pipeline) as loader:
        expected = numbers_of(loader)
    found: dict[int, int] = {}
    state: dict[str, Any] = {}
    for world_size, num_steps in ((2, 3), (1, 2), (3, 2)):
        begin = state.get("position", 0)
        for rank in range(world_size):
            with loaderkit.build(pipeline, rank=rank, world_size=world_size) as loader:
                if state:
                    loader.load_state_dict(state)
                stream = iter(loader)
                for step in range(num_steps):
                    for slot, text in enumerate(next(stream)["text"]):
                        found[begin + (step * 3 + slot) * world_size + rank] = number_of(text)
                after = loader.state_dict()
        state = after
    assert [found[place] for place in range(len(found))] == expected[: len(found)]
    assert len(found) == 42


def test_a_killed_process_is_started_again(make: Make, tmp_path: Path) -> None:
    pipeline = (
        make().shuffle(seed=1).read().call("serial_stages:dies_once", args={"folder": str(tmp_path)}).batch(4).epochs(1)
    )
    with loaderkit.build(pipeline, overrides={"prefetch.executor": "inline"}) as loader:
        (tmp_path / "died").touch()
        expected = numbers_of(loader)
    (tmp_path / "died").unlink()
    overrides = {"prefetch.executor": "process", "prefetch.restarts": 3}
    with loaderkit.build(pipeline, overrides=overrides) as loader:
        assert numbers_of(loader) == expected
        assert loader.stats().num_restarts == 1


def test_filtered_and_mixed(make: Make) -> None:
    mixed = Pipeline.mix({"a": make().filter(is_even), "b": make(limit=10)}, {"a": 0.5, "b": 0.5}, stop="all")
    pipeline = mixed.shuffle(seed=2).read().batch(5).prefetch(executor="inline").epochs(1)
    with loaderkit.build(pipeline) as loader:
        rows = [
            (source, number_of(text)) for b in loader for source, text in zip(b["__source__"], b["text"], strict=True)
        ]
    assert sorted(number for source, number in rows if int(source) == 0) == [*range(0, NUM, 2)]
    assert sorted(number for source, number in rows if int(source) == 1) == [*range(10)]


def test_packed_by_measured_lengths(make: Make, tmp_path: Path) -> None:
    pipeline = make().shuffle(seed=1).read().call("test_serial_pipelines:as_tokens").pack(64).batch(2).epochs(1)
    (tmp_path / "p.yaml").write_text(pipeline.to_yaml())
    assert main(["index", "--lengths", str(tmp_path / "p.yaml")]) == 0
    with loaderkit.build(tmp_path / "p.yaml") as loader:
        tokens = torch.cat([batch["input_ids"][batch["document_ids"] >= 0] for batch in loader]).tolist()
    with loaderkit.build(make().read().call(as_tokens).batch(1, ragged={"tokens": "list"}).epochs(1)) as loader:
        assert sorted(tokens) == sorted(token for batch in loader for token in batch["tokens"][0].tolist())


def test_commands(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text(make().read().batch(4).epochs(1).to_yaml())
    for command in ("check", "explain", "run"):
        assert main([command, str(tmp_path / "p.yaml"), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said
    out = tmp_path / "shards"
    assert main(["pack", str(tmp_path / "p.yaml"), "--out", str(out)]) == 0
    packed = Pipeline.tar(out, fields={"text": "text.txt;text.bin"})
    with loaderkit.build(packed.shuffle(False).read().decode().batch(64).epochs(1)) as loader:
        assert sorted(numbers_of(loader)) == [*range(NUM)]


def test_from_other_stores(make: Make, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    pipeline = make("memory://").shuffle(seed=4).read().batch(4).prefetch(concurrency=3).epochs(1)
    with loaderkit.build(pipeline, connectors={"memory": MemoryConnector(files)}) as loader:
        expected = numbers_of(loader)
    assert sorted(expected) == [*range(NUM)]
    cached = make(tmp_path / "data", cache={"dir": str(tmp_path / "kept"), "size": "1MiB"})
    with loaderkit.build(cached.shuffle(seed=4).read().batch(4).epochs(1)) as loader:
        assert numbers_of(loader) == expected


def test_many_small_files(make: Make, tmp_path: Path, rng: random.Random) -> None:
    """The places of samples among files, against counting."""
    data = tmp_path / "many"
    data.mkdir()
    expected = []
    for number in range(30):
        count = rng.randrange(4)
        name = f"{number:02}"
        (data / f"{name}.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for _ in range(count)))
        (data / f"{name}.txt").write_text(f"{number}\n" * count)
        (data / f"{name}.tfrecord").write_bytes(record(example({"text": [str(number).encode()]})) * count)
        expected += [number] * count
    with loaderkit.build(make(data).shuffle(False).read().batch(7).epochs(1)) as loader:
        assert numbers_of(loader) == expected
    with loaderkit.build(make(data, limit=11).shuffle(False).read().batch(7).epochs(1)) as loader:
        assert numbers_of(loader) == expected[:11]


def test_from_a_bucket(
    make: Make, seaweed: Seaweed, s3_keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With reading ahead, and by the indexes beside the files; the same order as from files."""
    with loaderkit.build(make().shuffle("block", seed=3, block=300).read().batch(4).epochs(1)) as loader:
        expected = numbers_of(loader)
    paths = [str(path) for path in (tmp_path / "data").iterdir()]
    assert main(["index", *paths]) == 0
    bucket = f"lines-{tmp_path.name.replace('_', '-').lower()}"
    upload(seaweed, tmp_path / "data", bucket)
    monkeypatch.setattr(offsets_file, "find_lines", lambda *args: pytest.fail("a file was scanned"))
    remote = make(f"s3://{bucket}", s3={"endpoint": seaweed.endpoint})
    with loaderkit.build(remote.shuffle("block", seed=3, block=300).read().batch(4).epochs(1)) as loader:
        assert numbers_of(loader) == expected


def test_with_a_limit_only_the_first_files_are_scanned(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(connector: Connector, info: ObjectInfo, *more: Any) -> Offsets:
        seen.append(info.key)
        return files.load_with(connector, info, *more)

    for module in (lines, tfrecord):
        monkeypatch.setattr(module, "load_with", noted)
    with loaderkit.build(make(limit=5).read().batch(5).epochs(1)) as loader:
        assert len(numbers_of(loader)) == 5
    assert len(seen) == 1
