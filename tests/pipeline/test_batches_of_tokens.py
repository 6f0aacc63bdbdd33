"""`batch: {tokens: N}` from the pipeline to the batch: at most N tokens, every sample once, resumed at any world size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_files import random_documents, write_megatron
from unequal import NUM, lengths_of

import loaderkit
from loaderkit.cli import main
from loaderkit.connectors.base import ConnectorTraits
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, StageError, StateError

TOKENS = 120
LENGTHS = lengths_of()


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def described(
    form: str = "pad", *, bad: list[int] | None = None, stages: list[Any] | None = None, **batch: Any
) -> dict[str, Any]:
    return {
        "source": {"kind": "dataset", "object": "unequal:Unequal", "args": {"bad": bad or []}},
        "order": {"seed": 5},
        "stages": [
            "read",
            *(stages or []),
            {"batch": {"tokens": TOKENS, "window": 70, "ragged": {"tokens": form}, **batch}},
        ],
        "prefetch": {"executor": "inline"},
    }


def measure(pipeline: dict[str, Any], folder: Path) -> None:
    """Keep the lengths of its samples."""
    path = folder / "measured.yaml"
    path.write_text(loaderkit.Pipeline(pipeline).to_yaml())
    assert main(["index", "--lengths", str(path)]) == 0


@pytest.fixture
def _measured(tmp_path: Path, cache_dir: Path) -> None:
    measure(described(), tmp_path)


def rows_of(batch: dict[str, Any], form: str = "pad") -> list[int]:
    """The numbers of a batch's samples, which has at most `TOKENS`, and of each all tokens."""
    numbers: list[int] = batch["number"].tolist()
    assert batch["__key__"] == list(map(str, numbers))
    if form == "list":
        assert sum(map(len, batch["tokens"])) <= TOKENS
        assert [tokens.tolist() for tokens in batch["tokens"]] == [[n] * LENGTHS[n] for n in numbers]
    else:
        assert batch["tokens"].numel() <= TOKENS
        assert batch["tokens"].shape[1] == max(batch["tokens_sizes"])
        for tokens, size, number in zip(batch["tokens"], batch["tokens_sizes"].tolist(), numbers, strict=True):
            assert tokens[:size].tolist() == [number] * LENGTHS[number]
    return numbers


@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize(("form", "window"), [("pad", 70), ("list", 70), ("pad", 0), ("list", 0)])
def test_every_sample_comes_once_an_epoch(form: str, window: int) -> None:
    seen = []
    for executor in ("inline", "thread"):
        with loaderkit.build(described(form, window=window), overrides={"prefetch.executor": executor}) as loader:
            assert (loader.num_samples, loader.batch_size, len(loader.dataset)) == (NUM, None, NUM)
            epochs = []
            for _ in range(2):
                num_batches = len(loader)
                batches = [rows_of(batch, form) for batch in loader]
                assert len(batches) == num_batches
                assert sorted(sum(batches, [])) == list(range(NUM))  # noqa: RUF017
                epochs.append(batches)
        assert epochs[0] != epochs[1]
        seen.append(epochs)
    assert seen[0] == seen[1]
    assert sum(LENGTHS) / len(seen[0][0]) > (0.7 if window else 0.3) * TOKENS


# ------------------------------------------------------------------------------------------------------ ranks and resume


def steps_of(
    world_size: int,
    state: dict[str, Any] | None,
    num_steps: int | None,
    num_batches: int,
    *,
    executor: str = "inline",
    **more: Any,
) -> tuple[list[list[int]], list[int], Any]:
    """(whole batches in their global order, samples of a last step that ranks share, state) of some steps of all ranks, or of
    the rest of an epoch of `num_batches`."""
    pipeline = described(**more)
    pipeline["prefetch"]["executor"] = executor
    loaders = [loaderkit.build(pipeline, rank=rank, world_size=world_size) for rank in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    iterators = [iter(loader) for loader in loaders]
    (num_left,) = {len(iterator) for iterator in iterators}  # every rank makes as many steps
    position, whole, shared, states = 0 if state is None else state["position"], [], [], [state]
    for _ in range(num_left if num_steps is None else num_steps):
        batches = [next(iterator) for iterator in iterators]
        states = [loader.state_dict() for loader in loaders]
        rows = [rows_of(batch, more.get("form", "pad")) for batch in batches]
        if position + world_size <= num_batches:
            assert not any(batch["__wrapped__"].any() for batch in batches if "__wrapped__" in batch)
            whole += [rows[place % world_size] for place in range(position, position + world_size)]
            position += world_size
            continue
        for batch, row in zip(batches, rows, strict=True):
            repeated = batch["__wrapped__"].tolist() if "__wrapped__" in batch else [False] * len(row)
            shared += [number for number, again in zip(row, repeated, strict=True) if not again]
    for loader in loaders:
        loader.close()
    assert all(one == states[0] for one in states)
    return whole, shared, states[0]


@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize("more", [{}, {"form": "list"}, {"window": 0}, {"cost": "none"}, {"drop_last": True}])
def test_resumed_at_any_number_of_ranks_the_rest_is_the_same(more: dict[str, Any], rng: random.Random) -> None:
    with loaderkit.build(described(**more)) as loader:
        wanted = [rows_of(batch, more.get("form", "pad")) for batch in loader]
    drops = more.get("drop_last", False)
    for world_size in (*rng.sample((1, 2, 3, 5), 2), 16):
        num_steps = rng.randint(1, max(1, (len(wanted) - 16) // world_size))
        before, shared, state = steps_of(world_size, None, num_steps, len(wanted), **more)
        assert before == wanted[: num_steps * world_size]
        assert state["position"] == len(before)
        assert not shared
        other = rng.choice([1, 2, 3, 4, 8, 16])
        executor = rng.choice(["inline", "thread"])
        after, shared, end = steps_of(other, state, None, len(wanted), executor=executor, **more)
        assert before + after == wanted[: len(before) + len(after)]
        rest = wanted[len(before) + len(after) :]
        assert len(rest) < other
        assert sorted(shared) == ([] if drops else sorted(sum(rest, [])))  # noqa: RUF017
        assert (end["epoch"], end["position"]) == (1, 0)


@pytest.mark.usefixtures("_measured")
def test_a_later_epoch_is_resumed_in_processes_and_another_plan_refused() -> None:
    processes = {"prefetch.executor": "process", "prefetch.processes": 2}
    with loaderkit.build(described()) as loader:
        list(loader)
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (1, 5)
        rest = [rows_of(batch) for batch in iterator]
        following = [rows_of(batch) for batch in loader]
    with loaderkit.build(described(), overrides=processes) as loader:
        loader.load_state_dict(state)
        assert [rows_of(batch) for batch in loader] == rest
        assert [rows_of(batch) for batch in loader] == following
    for other in ({"tokens": 121}, {"window": 60}, {"window": 0}, {"cost": "none"}, {"form": "list"}):
        with (
            loaderkit.build(described(**other)) as loader,
            pytest.raises(StateError, match="batches: the state has 120 tokens of 'tokens', pad, window 70"),
        ):
            loader.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------ bad samples


@pytest.mark.usefixtures("_measured")
@pytest.mark.parametrize("form", ["pad", "list"])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_bad_samples_make_no_batch_larger(form: str, policy: str) -> None:
    bad = [number for number in range(NUM) if number % 5 == 2]
    pipeline = described(form, bad=bad) | {"errors": {"on_bad_sample": policy}}
    with loaderkit.build(described(form)) as loader:
        wanted = [rows_of(batch, form) for batch in loader]
    seen = []
    for executor in ("inline", "thread"):
        with loaderkit.build(pipeline, overrides={"prefetch.executor": executor}) as loader:
            seen.append([rows_of(batch, form) for batch in loader])
    assert seen[0] == seen[1]
    with loaderkit.build(pipeline) as loader:
        begin, failed = loader.state_dict(), []
        for _ in range(2):  # what has replaced a sample is not in the plan
            loader.load_state_dict(begin)
            assert [rows_of(batch, form) for batch in loader] == seen[0]
            failed.append(sum(stage.num_failed for stage in loader.stats().stages))
        assert failed[1] == 2 * failed[0]
    for row, expected in zip(seen[0], wanted, strict=True):
        if policy == "skip":
            assert row == [number for number in expected if number not in bad]
        else:
            assert [n for n, other in zip(row, expected, strict=True) if other not in bad] == [
                n for n in expected if n not in bad
            ]
            assert all(LENGTHS[n] <= LENGTHS[other] for n, other in zip(row, expected, strict=True))
            assert not set(row) & set(bad)


def test_lengths_behind_a_function_are_measured_once_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"call": {"function": "unequal:same"}}
    pipeline = described(stages=[call])
    with pytest.raises(ConfigError, match="loaderkit index --lengths"):
        loaderkit.build(pipeline)
    measure(pipeline, tmp_path)
    with loaderkit.build(pipeline) as loader:
        assert sorted(number for batch in loader for number in rows_of(batch)) == list(range(NUM))
    import unequal

    monkeypatch.setattr(unequal, "same", unequal.doubled)
    with (
        loaderkit.build(pipeline) as loader,
        pytest.raises(StageError, match=r"its field 'tokens' is \[\d+\], and the batch is planned for a length of \d+"),
    ):
        list(loader)


def test_what_filter_drops_is_in_no_batch(tmp_path: Path) -> None:
    pipeline = described(stages=[{"filter": {"function": "unequal:is_short"}}])
    measure(pipeline, tmp_path)
    with loaderkit.build(pipeline) as loader:
        seen = sorted(number for batch in loader for number in rows_of(batch))
        assert loader.stats().num_dropped == 0
    assert seen == [number for number, length in enumerate(LENGTHS) if length < 20]


# ------------------------------------------------------------------------------------------------------ sources


class Remote(MemoryConnector):
    """A store that is slow."""

    traits = ConnectorTraits(is_remote=True)


@pytest.mark.parametrize(("rank", "world_size", "shuffle"), [(0, 1, "block"), (1, 3, "global"), (4, 5, "none")])
def test_from_a_slow_store_what_a_rank_needs_is_fetched_ahead(
    tmp_path: Path, rank: int, world_size: int, shuffle: str
) -> None:
    documents = random_documents(np.random.default_rng(7), 300, 30)
    path = write_megatron(tmp_path / "x", documents, "uint16")
    store = Remote({"x.bin": path.read_bytes(), "x.idx": path.with_suffix(".idx").read_bytes()})
    pipeline = {
        "source": {"kind": "tokens", "url": "memory://x.bin"},
        "order": {"shuffle": shuffle, "epochs": 1},
        "stages": ["read", {"batch": {"tokens": 1000, "window": 100, "ragged": {"tokens": "pad"}}}],
    }
    with loaderkit.build(pipeline, rank=rank, world_size=world_size, connectors={"memory": store}) as loader:
        num_bytes = 0
        for batch in loader:
            for key, tokens, size in zip(
                batch["__key__"], batch["tokens"], batch["tokens_sizes"].tolist(), strict=True
            ):
                assert tokens[:size].tolist() == documents[int(key)].tolist()
                num_bytes += 2 * size
        assert num_bytes > 1.5 * sum(map(len, documents)) / world_size
        assert loader.stats().to_dict()["store"]["direct_bytes"] < 0.02 * num_bytes


@pytest.mark.parametrize(("executor", "by"), [("inline", "sample"), ("thread", "tokens")])
def test_samples_of_several_sources_are_batched_together(tmp_path: Path, executor: str, by: str) -> None:
    parts = {
        "x": random_documents(np.random.default_rng(7), 120, 30),
        "y": random_documents(np.random.default_rng(8), 40, 50),
    }
    pipeline: dict[str, Any] = {
        "sources": [
            {
                "name": name,
                "kind": "tokens",
                "url": str(write_megatron(tmp_path / name, documents, "uint16")),
                "weight": 0.5,
                "epochs": 1 if name == "x" else 2,
            }
            for name, documents in parts.items()
        ],
        "mix": {"stop": "all", "by": by},
        "stages": ["read", {"batch": {"tokens": 1000, "window": 60, "ragged": {"tokens": "list"}}}],
        "prefetch": {"executor": executor},
    }
    with loaderkit.build(pipeline) as loader:
        batches = list(loader)
        assert loader.num_samples == 200
    found: list[tuple[int, list[int]]] = []
    for batch in batches:
        assert sum(map(len, batch["tokens"])) <= 1000
        found += zip(batch["__source__"].tolist(), (tokens.tolist() for tokens in batch["tokens"]), strict=True)
    wanted = [(0, document.tolist()) for document in parts["x"]] + 2 * [
        (1, document.tolist()) for document in parts["y"]
    ]
    assert sorted(found) == sorted(wanted)
    endless = {**pipeline, "mix": {"stop": "never", "by": by}}
    endless["sources"] = [{key: value for key, value in one.items() if key != "epochs"} for one in pipeline["sources"]]
    with pytest.raises(ConfigError, match="this mixture has no end"):
        loaderkit.build(endless)


def test_samples_of_one_length_need_no_ragged_field(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "x.bin")
    array = loaderkit.Pipeline.array(tmp_path / "x.bin", dtype="uint16", window=10, field="tokens")
    with loaderkit.build(array.read().batch(tokens=75)) as loader:
        shapes = [tuple(batch["tokens"].shape) for batch in loader]
    assert max(shapes) == (7, 10)
    assert sum(shape[0] for shape in shapes) == 991


# ------------------------------------------------------------------------------------------------------ settings


def test_behind_pack_a_batch_has_as_many_sequences_as_fit(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", random_documents(np.random.default_rng(7), 120, 30), "uint16")
    pipeline: dict[str, Any] = {
        "source": {"kind": "tokens", "url": str(path)},
        "stages": ["read", {"pack": {"length": 64}}, {"batch": {"tokens": 300, "drop_last": True}}],
    }
    with loaderkit.build(pipeline) as loader:
        assert loader.batch_size == 4
        assert {tuple(batch["input_ids"].shape) for batch in loader} == {(4, 64)}
        state = loader.state_dict()
    with loaderkit.build(pipeline, overrides={"stages.batch.tokens": 130}) as loader:
        loader.load_state_dict(state)  # a state counts sequences, so the size may change
        assert loader.batch_size == 2
    with pytest.raises(ConfigError, match=r"63 tokens hold no sequence of `pack: \{length: 64\}`: allow at least"):
        loaderkit.build(pipeline, overrides={"stages.batch.tokens": 63})
    with pytest.raises(ConfigError, match="sequences of `pack` are of one length"):
        loaderkit.build(pipeline, overrides={"stages.batch.window": 10})


@pytest.mark.usefixtures("_measured")
def test_what_cannot_be_planned_is_refused() -> None:
    longest = max(LENGTHS)
    with pytest.raises(
        ConfigError, match=rf"stages.batch.tokens: \d+ of {NUM} samples are longer than .* allow at least {longest}"
    ):
        loaderkit.build(described(tokens=longest - 1))
    with loaderkit.build(described(tokens=longest)) as loader:
        assert sum(len(batch["number"]) for batch in loader) == NUM
    with pytest.raises(ConfigError, match=r"samples have 1 to 60 tokens in 'tokens': say how"):
        loaderkit.build(described(ragged={}))
    for wrong, said in (
        ({"size": 3}, "or `tokens`, the most tokens of one, not both"),
        ({"tokens": None}, "'size' is missing"),
        ({"size": 3, "tokens": None}, "`window` says how batches of `tokens` are planned"),
    ):
        with pytest.raises(ConfigError, match=said):
            loaderkit.build(described(**wrong))
    stream = {"source": {"kind": "iterable", "object": [{"tokens": [1]}]}, "stages": described()["stages"]}
    with pytest.raises(ConfigError, match="of an iterable they show only when it is read"):
        loaderkit.build(stream)
    with pytest.raises(ConfigError, match="DALI takes batches of one size"):
        loaderkit.build(described(stages=[{"decode": {"device": "dali-cpu"}}]))
    with pytest.raises(ConfigError, match=r"\d+ batches of 120 tokens are not one for each of 999 ranks"):
        loaderkit.build(described(drop_last=True), rank=0, world_size=999)


@pytest.mark.usefixtures("_measured")
def test_more_ranks_than_samples_repeat_some() -> None:
    with loaderkit.build(described()) as loader:
        first = rows_of(next(iter(loader)))
    rows, repeated = [], 0
    for rank in range(999):
        if rank % 111 == 0:
            with loaderkit.build(described(), rank=rank, world_size=999) as loader:
                assert len(loader) == 1
                (batch,) = loader
            rows += rows_of(batch)
            repeated += int(batch["__wrapped__"].sum())
    assert len(rows) == 9
    assert first


def test_check_explain_and_run_tell_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_megatron(tmp_path / "x", random_documents(np.random.default_rng(7), 120, 30), "uint16")
    path = tmp_path / "p.yaml"
    path.write_text(
        "source: {kind: tokens, url: x.bin}\nprefetch: {executor: inline}\n"
        "stages:\n  - read\n  - batch: {tokens: 500, window: 30, ragged: {tokens: pad}}\n"
    )
    with loaderkit.build(path) as loader:
        num_batches = [len(list(loader)), len(list(loader))]
        assert num_batches[0] != num_batches[1]
        assert "batches of up to 500 tokens" in repr(loader)
    for command in ("check", "explain"):
        assert main([command, str(path)]) == 0
        assert f"{num_batches[0]} per epoch on one rank, of up to 500 tokens" in capsys.readouterr().out
    assert main(["run", str(path), "--epochs", "2"]) == 0
    assert f"{sum(num_batches)} batches, 240 samples" in capsys.readouterr().out
    explained = tmp_path / "explained.yaml"
    assert main(["explain", str(path)]) == 0
    explained.write_text(capsys.readouterr().out)
    assert main(["check", str(explained)]) == 0
