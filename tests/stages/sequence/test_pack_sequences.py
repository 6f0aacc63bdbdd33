"""`pack` from the pipeline to the batch: tokens where the plan says, masks that keep documents apart, exact resume."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from token_files import random_documents, write_megatron

import loaderkit
from loaderkit.cli import main
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.file import FileConnector
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, LoaderkitError, StageError, StateError

LENGTH = 64


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def documents() -> list[NDArray[np.generic]]:
    """120 documents of 1 to about 300 tokens."""
    return random_documents(np.random.default_rng(7), 120, 30)


@pytest.fixture
def path(tmp_path: Path, documents: list[NDArray[np.generic]]) -> Path:
    return write_megatron(tmp_path / "x", documents, "uint16")


def described(path: Path, *, size: int = 3, executor: str = "inline", **pack: Any) -> dict[str, Any]:
    return {
        "source": {"kind": "tokens", "url": str(path)},
        "order": {"seed": 3},
        "stages": ["read", {"pack": {"length": LENGTH, "window": 50, **pack}}, {"batch": {"size": size}}],
        "prefetch": {"executor": executor},
    }


def pieces_of(batch: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """(key, tokens) of all pieces of a batch, by its fields, which are checked against each other."""
    found = []
    size, bounds = len(batch["input_ids"]), batch["cu_seqlens"].tolist()
    tokens, documents, positions = (
        batch[name].reshape(-1).tolist() for name in ("input_ids", "document_ids", "position_ids")
    )
    assert batch["cu_seqlens"].dtype == batch["position_ids"].dtype == batch["document_ids"].dtype == torch.int32
    assert (bounds[0], bounds[-1]) == (0, size * LENGTH)
    assert set(range(0, size * LENGTH + 1, LENGTH)) <= set(bounds)  # no piece runs from one sequence into the next
    slot, keys = -1, []
    for begin, end in pairwise(bounds):
        assert begin < end
        if begin % LENGTH == 0:
            slot, number = slot + 1, 0
            keys = batch["__key__"][slot].split(" ")
        assert positions[begin:end] == list(range(end - begin))
        if documents[begin] < 0:
            assert end % LENGTH == 0
            assert tokens[begin:end] == [0] * (end - begin)
            assert documents[begin:end] == [-1] * (end - begin)
            continue
        assert documents[begin:end] == [number] * (end - begin)
        found.append((keys[number], tokens[begin:end]))
        number += 1
    return found


def wanted_of(key: str, documents: list[NDArray[np.generic]]) -> list[int]:
    number, _, part = key.partition("[")
    tokens: list[int] = documents[int(number)].tolist()
    if part:
        first, end = map(int, part.rstrip("]").split(":"))
        tokens = tokens[first:end]
    return tokens


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
@pytest.mark.parametrize("cost", ["attention", "none"])
def test_every_token_comes_once_an_epoch(
    path: Path, documents: list[NDArray[np.generic]], executor: str, cost: str
) -> None:
    with loaderkit.build(described(path, executor=executor, cost=cost)) as loader:
        for _ in range(2):
            tokens: Counter[int] = Counter()
            num_batches = len(loader)
            batches = list(loader)
            assert len(batches) == num_batches
            for batch in batches:
                for key, values in pieces_of(batch):
                    assert values == wanted_of(key, documents)
                    tokens.update(values)
            assert tokens == Counter(np.concatenate(documents).tolist())


def test_the_same_by_other_stages_and_by_connectors_without_bulk_reads(
    path: Path, tmp_path: Path, documents: list[NDArray[np.generic]]
) -> None:
    """Tokens that `read` puts into place, and those that `pack` copies."""
    np.save(tmp_path / "x.npy", np.concatenate(documents).astype(">u2"))
    sources: list[dict[str, Any]] = [
        {"source": {"kind": "tokens", "url": str(path)}},
        {"source": {"kind": "tokens", "url": str(tmp_path / "x.npy"), "end": 0}},
    ]
    seen = []
    for more in sources:
        with loaderkit.build({**described(path), **more}) as loader:
            seen.append([batch["input_ids"].tolist() for batch in loader])
    copied = described(path)
    copied["stages"].insert(1, {"call": {"function": same}})
    (tmp_path / "p.yaml").write_text(yaml_of(path, function="test_pack_sequences:same"))
    assert main(["index", "--lengths", str(tmp_path / "p.yaml")]) == 0
    with loaderkit.build(tmp_path / "p.yaml") as loader:
        seen.append([batch["input_ids"].tolist() for batch in loader])
    assert seen[0] == seen[1] == seen[2]


def test_the_documents_of_a_chunk_are_read_by_one_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    scatter = FileConnector.scatter_into

    def counted(self: FileConnector, key: str, starts: Any, *others: Any, etag: str | None = None) -> None:
        calls.append(len(starts))
        scatter(self, key, starts, *others, etag=etag)

    monkeypatch.setattr(FileConnector, "scatter_into", counted)
    with loaderkit.build(described(path, size=4)) as loader:
        batch = next(iter(loader))
    first, *of_chunks = calls
    assert first == 1  # it shows the layout
    assert sum(of_chunks) == sum(len(key.split(" ")) for key in batch["__key__"])
    assert len(of_chunks) <= 4  # one for a chunk, which has a sequence at least


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_fields_that_output_leaves_out_are_not_made(path: Path, executor: str) -> None:
    with loaderkit.build(described(path)) as loader:
        wanted = list(loader)
    for names in (["input_ids", "cu_seqlens"], ["document_ids"], ["position_ids", "input_ids", "__key__"]):
        with loaderkit.build({**described(path, executor=executor), "output": names}) as loader:
            batches = list(loader)
            batch_bytes = loader.stats().memory["batch_bytes"]
        for batch, whole in zip(batches, wanted, strict=True):
            for name, value in zip(names, batch, strict=True):
                assert value == whole[name] if name == "__key__" else torch.equal(value, whole[name])
        num_fields = len({"position_ids", "document_ids"} & {*names})
        assert batch_bytes == 3 * LENGTH * (2 + 4 * num_fields)
    behind = described(path)
    behind["stages"].append({"call": {"function": needs_all}})
    with loaderkit.build({**behind, "output": ["input_ids"]}) as loader:
        assert torch.equal(next(iter(loader))[0], wanted[0]["input_ids"])


def needs_all(batch: dict[str, Any]) -> None:
    assert {"input_ids", "position_ids", "document_ids", "cu_seqlens"} <= {*batch}


def same(sample: dict[str, Any]) -> None:
    pass


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": torch.cat([sample["tokens"], sample["tokens"]])}


def yaml_of(path: Path, *, function: str, field: str = "tokens") -> str:
    return (
        f"source: {{kind: tokens, url: {path}}}\norder: {{seed: 3}}\nprefetch: {{executor: inline}}\n"
        f'stages:\n  - read\n  - call: {{function: "{function}"}}\n'
        f"  - pack: {{length: {LENGTH}, window: 50, field: {field}}}\n  - batch: {{size: 3}}\n"
    )


def test_lengths_of_other_documents_are_measured_once(
    path: Path, tmp_path: Path, documents: list[NDArray[np.generic]], capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text(yaml_of(path, function="test_pack_sequences:double"))
    with pytest.raises(ConfigError, match="loaderkit index --lengths"):
        loaderkit.build(pipeline)
    assert main(["index", "--lengths", str(pipeline), "--json"]) == 0
    assert f'"num_tokens": {2 * sum(map(len, documents))}' in capsys.readouterr().out
    with loaderkit.build(pipeline) as loader:
        tokens = sum((batch["document_ids"] >= 0).sum().item() for batch in loader)
    assert tokens == 2 * sum(map(len, documents))


def test_lengths_that_have_changed_are_an_error(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: list[NDArray[np.generic]]
) -> None:
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text(yaml_of(path, function="test_pack_sequences:same"))
    assert main(["index", "--lengths", str(pipeline)]) == 0
    monkeypatch.setitem(same.__globals__, "same", double)
    with loaderkit.build(pipeline) as loader, pytest.raises(StageError, match="and the index of lengths says"):
        list(loader)


def test_what_cannot_be_packed_is_refused(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"stages.pack.split: \d+ of 120 documents are longer than `length: 64`, the first"
    ):
        loaderkit.build(described(path, split="never"))
    with loaderkit.build(described(path, split="never", length=1000)) as loader:
        assert len(loader) > 0
    misplaced = described(path)
    misplaced["stages"].insert(2, {"call": {"function": same}})
    with pytest.raises(ConfigError, match="directly before `batch`"):
        loaderkit.build(misplaced)
    stream = {"source": {"kind": "iterable", "object": [{"tokens": [1]}]}, "stages": described(path)["stages"]}
    with pytest.raises(ConfigError, match="of an iterable they show only when it is read"):
        loaderkit.build(stream)
    plain = tmp_path / "plain.yaml"
    plain.write_text(f"source: {{kind: tokens, url: {path}}}\nstages:\n  - read\n  - batch: {{size: 1}}\n")
    assert main(["index", "--lengths", str(plain)]) == 2
    assert main(["index"]) == 2
    assert "there is neither `pack` nor `tokens`" in capsys.readouterr().err
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text(yaml_of(path, function="test_pack_sequences:same", field="words"))
    assert main(["index", "--lengths", str(pipeline)]) == 1
    assert "has no field 'words', but tokens" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ ranks and resume


def steps_of(
    path: Path, world_size: int, state: dict[str, Any] | None, num_steps: int | None, **more: Any
) -> tuple[Any, Any]:
    """(sequences in their global order, state) of some steps of all ranks, or of the rest of the epoch."""
    loaders = [loaderkit.build(described(path, **more), rank=rank, world_size=world_size) for rank in range(world_size)]
    rows, states, begin = [], [state], 0 if state is None else state["position"]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    iterators = [iter(loader) for loader in loaders]
    lengths = {len(iterator) for iterator in iterators}
    assert len(lengths) == 1  # every rank makes as many steps
    for _ in range(lengths.pop() if num_steps is None else num_steps):
        batches = [next(iterator) for iterator in iterators]
        states = [loader.state_dict() for loader in loaders]
        first = begin % world_size  # the rank of the step's first position
        begin = loaders[0].state_dict()["position"]
        for slot in range(max(len(batch["__key__"]) for batch in batches)):
            rows += [
                (batch["__key__"][slot], batch["input_ids"][slot].tolist())
                for batch in batches[first:] + batches[:first]
                if slot < len(batch["__key__"]) and not ("__wrapped__" in batch and batch["__wrapped__"][slot])
            ]
    for loader in loaders:
        loader.close()
    assert all(one == states[0] for one in states)
    return rows, states[0]


def test_resumed_at_any_number_of_ranks_the_rest_is_the_same(path: Path, rng: random.Random) -> None:
    whole, _ = steps_of(path, 1, None, None)
    for world_size in (1, 2, 3, 4, 8):
        size = rng.choice([1, 2, 3])
        most = len(whole) // (world_size * size)
        num_steps = rng.randrange(1, most)
        before, state = steps_of(path, world_size, None, num_steps, size=size)
        assert before == whole[: len(before)]
        for other in rng.sample([1, 2, 3, 4, 8], 2):
            after, _ = steps_of(path, other, state, None, size=rng.choice([1, 2, 3]))
            assert before + after == whole


def test_another_epoch_is_resumed_and_another_packing_refused(path: Path) -> None:
    with loaderkit.build(described(path)) as loader:
        list(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        assert state["epoch"] == 1
        rest = [batch["__key__"] for batch in iterator]
    with loaderkit.build(described(path)) as loader:
        loader.load_state_dict(state)
        assert [batch["__key__"] for batch in loader] == rest
    with loaderkit.build(described(path, window=60)) as loader, pytest.raises(StateError, match="pack"):
        loader.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------ bad documents


def fails_for_some(sample: dict[str, Any]) -> None:
    if int(sample["__key__"]) % 17 == 5:
        raise ValueError("a bad document")


@pytest.mark.parametrize("policy", ["skip", "replace", "raise"])
def test_bad_documents(
    path: Path,
    tmp_path: Path,
    documents: list[NDArray[np.generic]],
    policy: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = tmp_path / "p.yaml"
    pipeline.write_text(yaml_of(path, function="test_pack_sequences:same"))
    bad = {str(number) for number in range(120) if number % 17 == 5}
    text = yaml_of(path, function="test_pack_sequences:fails_for_some") + f"errors: {{on_bad_sample: {policy}}}\n"
    pipeline.write_text(text.replace("fails_for_some", "same"))
    assert main(["index", "--lengths", str(pipeline)]) == 0
    (kept,) = (tmp_path / "cache" / "lengths").iterdir()
    lengths = np.array([len(document) for document in documents])
    pipeline.write_text(text)
    if policy == "raise":
        assert main(["index", "--lengths", str(pipeline)]) == 1
        return
    # The documents have become bad since they were measured.
    assert main(["index", "--lengths", str(pipeline)]) == 0
    (other,) = (one for one in kept.parent.iterdir() if one != kept)
    with np.load(other) as parts:
        assert sorted(np.flatnonzero(parts["lengths"] == 0).tolist()) == sorted(map(int, bad))
        assert int(parts["num_bad"]) == len(bad)
        made_of = parts["made_of"]
    with pytest.raises(ConfigError, match=f"{len(bad)} samples were bad when .* measured them"):
        loaderkit.build(pipeline, overrides={"errors.on_bad_sample": "raise"})
    with loaderkit.build(pipeline):
        assert f"{len(bad)} of 120 samples were bad, dropped or empty" in caplog.text
    np.savez(other, made_of=made_of, lengths=lengths, num_bad=0)
    rows = []
    for executor in ("inline", "thread"):
        with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
            batches = list(loader)
        rows.append([batch["input_ids"].tolist() for batch in batches])
    assert rows[0] == rows[1]
    found: Counter[int] = Counter()
    for batch in batches:
        good = batch["document_ids"].numpy() >= 0
        if policy == "replace":
            assert not bad & {key.partition("[")[0] for keys in batch["__key__"] for key in keys.split(" ")}
            pieces_of(batch)
        assert not batch["input_ids"].numpy()[~good].any()
        found.update(batch["input_ids"].numpy()[good].tolist())
    if policy == "skip":
        rest = [document for number, document in enumerate(documents) if str(number) not in bad]
        assert found == Counter(np.concatenate(rest).tolist())


def test_a_document_that_cannot_be_read_is_named(path: Path) -> None:
    with loaderkit.build(described(path)) as loader:
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(LoaderkitError, match=r"read failed for sample '\d+' in"):
            list(loader)


# ------------------------------------------------------------------------------------------------------ slow stores


class Remote(MemoryConnector):
    """A store that is slow, and counts what it reads."""

    traits = ConnectorTraits(is_remote=True, coalesce_gap=0)

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.num_bytes = 0

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        super().read_into(key, start, buffer, etag=etag)
        self.num_bytes += len(buffer)


def test_from_a_slow_store_every_piece_is_fetched_once(path: Path, documents: list[NDArray[np.generic]]) -> None:
    store = Remote({"x.bin": path.read_bytes(), "x.idx": path.with_suffix(".idx").read_bytes()})
    remote = described(path, executor="thread")
    remote["source"]["url"] = "memory://x.bin"
    remote["order"]["epochs"] = 1
    with loaderkit.build(remote, connectors={"memory": store}) as loader, loaderkit.build(described(path)) as other:
        store.num_bytes = 0
        batches = list(loader)
        assert [batch["input_ids"].tolist() for batch in batches] == [batch["input_ids"].tolist() for batch in other]
    num_bytes = path.stat().st_size
    assert num_bytes <= store.num_bytes <= 1.2 * num_bytes  # and the first document, which shows the layout


# ------------------------------------------------------------------------------------------------------ mixtures


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_documents_of_several_sources_are_packed_together(
    path: Path, tmp_path: Path, documents: list[NDArray[np.generic]], executor: str
) -> None:
    others = random_documents(np.random.default_rng(8), 40, 50)
    other = write_megatron(tmp_path / "y", others, "uint16")
    mixed = described(path, executor=executor)
    del mixed["source"]
    mixed["sources"] = [
        {"name": "x", "kind": "tokens", "url": str(path), "weight": 0.5, "epochs": 1},
        {"name": "y", "kind": "tokens", "url": str(other), "weight": 0.5, "epochs": 2},
    ]
    mixed["mix"] = {"stop": "all"}
    wanted = Counter(np.concatenate([*documents, *others, *others]).tolist())
    with loaderkit.build(mixed) as loader:
        batches = list(loader)
        tokens = [token for batch in batches for _, piece in pieces_of(batch) for token in piece]
        assert Counter(tokens) == wanted
    with loaderkit.build(mixed) as loader:
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        state = loader.state_dict()
    with loaderkit.build(mixed) as loader:
        loader.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in loader] == [b["input_ids"].tolist() for b in batches[7:]]


def test_a_mixture_without_end_is_not_packed(path: Path) -> None:
    mixed = described(path)
    mixed["sources"] = [{"name": "x", "weight": 1, **mixed.pop("source")}]
    mixed["mix"] = {"stop": "never"}
    with pytest.raises(ConfigError, match="this mixture has no end"):
        loaderkit.build(mixed)


def test_what_a_loader_says_of_itself_is_of_one_epoch(path: Path) -> None:
    """Epochs have other numbers of sequences; behind the last batch it still is that epoch."""
    with loaderkit.build(described(path, size=1, window=7)) as loader:
        sizes = []
        for epoch in range(4):
            sizes.append(loader.num_samples)
            assert sum(1 for _ in loader) == sizes[-1]
            assert f": {sizes[-1]} samples, {sizes[-1]} batches of 1, on rank 0 of 1, epoch {epoch}>" in repr(loader)
        assert len(set(sizes)) > 1


def test_a_field_that_the_source_has_not_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="the source knows those of 'tokens', not of 'toks'"):
        loaderkit.build(described(path, field="toks"))
