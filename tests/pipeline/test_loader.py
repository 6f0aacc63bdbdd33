"""What a training loop relies on: the same bytes always, exact resume, ranks that share out the data, states that fit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from augmented_photos import (
    _reference,  # noqa: F401 - a fixture
    augmented,
    digest,
    digests,
    nothing_left_running,  # noqa: F401 - a fixture for every test here
)
from conftest import HELPERS
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import loaderkit
from loaderkit import Pipeline
from loaderkit.checkpoint import StreamReader
from loaderkit.errors import ClosedError, ConfigError, StateError

TESTS = [str(Path(__file__).parent), str(HELPERS.parent), str(HELPERS)]


def _with_keys(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "copied": list(batch["__key__"])}


class TestBytes:
    @pytest.mark.matrix(3)
    @pytest.mark.parametrize("workers", [1, 2, 8])
    @pytest.mark.parametrize("depth", [1, 4, 16])
    def test_same_for_any_concurrency(self, photos: Path, reference: list[str], workers: int, depth: int) -> None:
        overrides = {"prefetch.concurrency": workers, "prefetch.batches": depth}
        with loaderkit.build(augmented(photos), overrides=overrides) as loader:
            assert digests(loader, 3) == reference

    @pytest.mark.matrix(3)
    @pytest.mark.parametrize(
        "overrides",
        [
            {"stages.decode.workers": 2},
            {"stages.read.workers": 3, "stages.color_jitter.workers": 2},
            {"stages.batch.workers": 1, "stages.normalize.workers": 2},
            {"stages.transfer.workers": 1, "stages.read.workers": 1},
            {"prefetch.memory": "100KiB"},
            {"stages.decode.workers": 2, "prefetch.executor": "inline"},
        ],
    )
    def test_same_for_any_pools(self, photos: Path, reference: list[str], overrides: dict[str, Any]) -> None:
        with loaderkit.build(augmented(photos), overrides=overrides) as loader:
            assert digests(loader, 3) == reference

    def test_epochs_differ_in_order_and_augmentation(self, reference: list[str]) -> None:
        assert len(set(reference)) == len(reference)

    def test_another_seed_is_another_run(self, photos: Path, reference: list[str]) -> None:
        with loaderkit.build(augmented(photos, seed=4)) as loader:
            assert not set(digests(loader)) & set(reference)

    def test_files_and_tar_hold_the_same_samples(self, photos: Path, shards: Path) -> None:
        def pixels(pipeline: Pipeline) -> dict[str, bytes]:
            described = pipeline.shuffle("none").read().decode().resize([16, 16]).batch(7)
            with loaderkit.build(described) as loader:
                return {
                    key.rpartition("/")[2].removesuffix(".jpg"): image.numpy().tobytes() + bytes([int(label)])
                    for batch in loader
                    for key, image, label in zip(batch["__key__"], batch["image"], batch["label"], strict=True)
                }

        from_files = pixels(Pipeline.files(photos, label="parent"))
        assert len(from_files) == 60
        assert pixels(Pipeline.tar(shards)) == from_files


class TestResume:
    def test_after_every_batch_of_an_epoch(self, photos: Path, reference: list[str]) -> None:
        states = []
        with loaderkit.build(augmented(photos)) as loader:
            num_batches = len(loader)
            assert num_batches == 8
            states.append(json.dumps(loader.state_dict()))
            states += [json.dumps(loader.state_dict()) for _ in loader]
        for delivered, state in enumerate(states):
            with loaderkit.build(augmented(photos)) as loader:
                loader.load_state_dict(json.loads(state))
                assert json.dumps(loader.state_dict()) == state, "loading a state must not change it"
                if delivered < num_batches:
                    assert digests(loader) == reference[delivered:num_batches]
                following = [digest(batch) for batch, _ in zip(loader, range(2), strict=False)]
                assert following == reference[num_batches : num_batches + 2]

    @pytest.mark.prove
    def test_after_every_batch_in_a_new_process(self, photos: Path, reference: list[str], tmp_path: Path) -> None:
        (tmp_path / "p.yaml").write_text(augmented(photos).to_yaml())
        with loaderkit.build(tmp_path / "p.yaml") as loader:
            states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
        (tmp_path / "states.json").write_text(json.dumps(states))
        program = (
            "import json, sys; sys.path[:0] = sys.argv[3:]; import loaderkit; from augmented_photos import digests\n"
            "found = []\n"
            "for state in json.load(open(sys.argv[2])):\n"
            "    with loaderkit.build(sys.argv[1], overrides={'prefetch.concurrency': 3}) as loader:\n"
            "        loader.load_state_dict(state)\n"
            "        found.append(digests(loader))\n"
            "print(json.dumps(found))\n"
        )
        arguments = [str(tmp_path / "p.yaml"), str(tmp_path / "states.json"), *TESTS]
        ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert json.loads(ran.stdout) == [reference[delivered:8] for delivered in range(8)] + [reference[8:16]]

    def test_state_counts_what_was_delivered_not_what_was_read_ahead(self, photos: Path) -> None:
        with loaderkit.build(augmented(photos), overrides={"prefetch.batches": 8}) as loader:
            stream = iter(loader)
            assert loader.state_dict()["position"] == 0
            next(stream)
            assert loader.state_dict()["position"] == 8

    def test_after_the_last_batch_is_the_next_epoch(self, photos: Path, reference: list[str]) -> None:
        with loaderkit.build(augmented(photos)) as loader:
            digests(loader)
            state = loader.state_dict()
            assert loader.epoch == 0
        assert (state["epoch"], state["position"]) == (1, 0)
        for saved in (state, {**state, "epoch": 0, "position": 60}):  # as it was saved once
            with loaderkit.build(augmented(photos).epochs(2)) as loader:
                loader.load_state_dict(saved)
                assert [digests(loader) for _ in range(loader.epoch, 2)] == [reference[8:16]]
                assert list(loader) == []

    def test_of_what_is_left_there_is_no_batch_for_each_rank(self, photos: Path) -> None:
        with loaderkit.build(augmented(photos, drop_last=True)) as loader:
            stream = iter(loader)
            for _ in range(6):
                next(stream)
            state = loader.state_dict()
        assert state["position"] == 48
        with loaderkit.build(augmented(photos, drop_last=True), rank=1, world_size=2) as loader:
            loader.load_state_dict(state)
            assert loader.epoch == 1
            assert len(list(loader)) == 3

    def test_with_other_ranks_and_batch_size_covers_the_rest(self, photos: Path) -> None:
        def keys(loader: loaderkit.Loader) -> list[str]:
            return [key for batch in loader for key in batch["__key__"]]

        with loaderkit.build(augmented(photos)) as loader:
            stream = iter(loader)
            begun = [key for _ in range(2) for key in next(stream)["__key__"]]
            state = loader.state_dict()
            rest = [key for batch in stream for key in batch["__key__"]]
        shared = []
        for rank in range(4):
            with loaderkit.build(augmented(photos, 5), rank=rank, world_size=4) as loader:
                loader.load_state_dict(state)
                shared.append(keys(loader))
        assert sorted(key for part in shared for key in part) == sorted(rest)
        assert [key for row in zip(*shared, strict=True) for key in row] == rest
        assert len(begun) + len(rest) == 60

    def test_in_a_loop_that_sets_the_epoch(self, photos: Path, reference: list[str]) -> None:
        """The usual loop calls set_epoch(epoch) at its top; that must not rewind a resumed epoch."""
        with loaderkit.build(augmented(photos)) as loader:
            stream = iter(loader)
            next(stream)
            state = loader.state_dict()
        seen = []
        with loaderkit.build(augmented(photos)) as loader:
            loader.load_state_dict(state)
            for epoch in range(loader.epoch, 2):
                loader.set_epoch(epoch)
                seen += digests(loader)
        assert seen == reference[1:16]

    def test_length_is_that_of_an_epoch_and_of_an_iterator_what_is_left(self, photos: Path) -> None:
        """Schedules of learning rates need the former, progress bars the latter."""
        with loaderkit.build(augmented(photos)) as loader:
            iterator = iter(loader)
            next(iterator)
            assert (len(loader), len(iterator)) == (8, 7)
            state = loader.state_dict()
        with loaderkit.build(augmented(photos)) as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            assert (len(loader), len(iterator)) == (8, 7)
            assert len(list(iterator)) == 7
            assert len(iterator) == 0
            assert len(iter(loader)) == 8

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_dcp_loads_the_state_of_another_pipeline_and_the_difference_is_named(
        self, photos: Path, tmp_path: Path
    ) -> None:
        pipeline = Pipeline.files(photos).read().decode()
        with loaderkit.build(pipeline.resize(16).center_crop(16).batch(4)) as loader:
            next(iter(loader))
            save({"loader": loader.state_dict()}, checkpoint_id=tmp_path / "step-1", no_dist=True)
            wanted = loader.state_dict()
        flipped = pipeline.resize(16).center_crop(16).random_horizontal_flip().batch(4)
        with loaderkit.build(pipeline.resize(16).center_crop(16).batch(4)) as same, loaderkit.build(flipped) as other:
            for reader in (FileSystemReader(tmp_path / "step-1"), StreamReader(tmp_path / "step-1")):
                state = {"loader": same.state_dict()}
                load(state, storage_reader=reader, no_dist=True)
                same.load_state_dict(state["loader"])
                assert same.state_dict() == wanted
                state = {"loader": other.state_dict()}
                load(state, storage_reader=reader, no_dist=True)
                with pytest.raises(StateError, match=r"random_horizontal_flip: the state has nothing, this loader"):
                    other.load_state_dict(state["loader"])

    def test_a_state_with_a_dict_for_a_fingerprint(self, photos: Path) -> None:
        """As states were saved before."""
        with loaderkit.build(augmented(photos)) as loader:
            state = loader.state_dict()
            loader.load_state_dict({**state, "fingerprint": dict(state["fingerprint"]), "position": 16})
            assert loader.state_dict() == {**state, "position": 16}

    def test_refuses_the_state_of_another_pipeline(self, photos: Path, shards: Path) -> None:
        with loaderkit.build(augmented(photos)) as loader:
            state = loader.state_dict()
        others = {
            "data": Pipeline.files(photos / "ant").shuffle(seed=3).read().decode().resize([8, 8]).batch(8),
            "seed": augmented(photos, seed=9),
            "stages": augmented(photos).call(lambda batch: batch),
        }
        for part, other in others.items():
            with loaderkit.build(other) as loader, pytest.raises(StateError, match=part):
                loader.load_state_dict(state)
        changed = loaderkit.build(augmented(photos), overrides={"stages.random_resized_crop.scale": [0.5, 1.0]})
        with changed, pytest.raises(StateError, match=r"stages\.random_resized_crop"):
            changed.load_state_dict(state)

    def test_saving_costs_microseconds_of_work(self, photos: Path) -> None:
        """No listing, no hashing, no copy of the data: the state is built from what is known."""
        with loaderkit.build(augmented(photos)) as loader:
            calls: list[str] = []

            def count(frame: Any, event: str, argument: Any) -> None:
                if event == "call":
                    calls.append(frame.f_code.co_name)

            sys.setprofile(count)
            try:
                loader.state_dict()
            finally:
                sys.setprofile(None)
        assert len(calls) < 20


class TestRanks:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 8])
    @pytest.mark.parametrize("shuffle", ["global", "block", "none"])
    def test_together_the_data_set_in_the_order_of_one_rank(self, photos: Path, world_size: int, shuffle: Any) -> None:
        block: dict[str, Any] = {"block": "20KiB", "window": 2, "lanes": 4} if shuffle == "block" else {}
        pipeline = Pipeline.files(photos).shuffle(shuffle, seed=1, **block).read().batch(4)

        def rows(rank: int, world: int) -> list[tuple[str, bool]]:
            with loaderkit.build(pipeline, rank=rank, world_size=world) as loader:
                return [
                    (key, bool(mark))
                    for batch in loader
                    for key, mark in zip(
                        batch["__key__"], batch.get("__wrapped__", torch.zeros(len(batch["__key__"]))), strict=True
                    )
                ]

        alone = [key for key, _ in rows(0, 1)]
        assert len(set(alone)) == 60
        ranks = [rows(rank, world_size) for rank in range(world_size)]
        assert len({len(part) for part in ranks}) == 1, "ranks with different numbers of samples hang collectives"
        interleaved = [item for row in zip(*ranks, strict=True) for item in row]
        assert [key for key, wrapped in interleaved if not wrapped] == alone
        assert [wrapped for _, wrapped in interleaved] == [place >= 60 for place in range(len(interleaved))]

    def test_drop_last_gives_every_rank_whole_batches(self, photos: Path) -> None:
        for rank in range(3):
            pipeline = Pipeline.files(photos).read().batch(7, drop_last=True)
            with loaderkit.build(pipeline, rank=rank, world_size=3) as loader:
                batches = list(loader)
            assert [len(batch["__key__"]) for batch in batches] == [7, 7] == [7] * len(loader)
            assert all("__wrapped__" not in batch for batch in batches)

    def test_zero_batches_is_an_error(self, photos: Path) -> None:
        with pytest.raises(ConfigError, match="no batch at all"):
            loaderkit.build(augmented(photos, 64, drop_last=True))


class TestEpochs:
    def test_an_early_break_goes_on_with_the_next_epoch(self, photos: Path, reference: list[str]) -> None:
        with loaderkit.build(augmented(photos)) as loader:
            for _ in loader:
                break
            assert (loader.epoch, loader.state_dict()["position"]) == (0, 8)
            assert digests(loader) == reference[8:16]

    def test_an_iterator_without_next_uses_up_no_epoch(self, photos: Path, reference: list[str]) -> None:
        with loaderkit.build(augmented(photos)) as loader:
            unused = iter(loader)
            assert len(unused) == len(iter(loader)) == 8
            assert digests(loader) == reference[:8]
            with pytest.raises(ClosedError, match="newer"):
                next(unused)
            late = iter(loader)
            loader.set_epoch(2)
            next(late)
            assert loader.epoch == 2, "the first next() takes the epoch"

    def test_a_limit_of_epochs(self, photos: Path, reference: list[str]) -> None:
        with loaderkit.build(augmented(photos).epochs(2)) as loader:
            assert digests(loader, 2) == reference[:16]
            assert list(loader) == []
            loader.start()
            assert list(loader) == []

    def test_set_epoch(self, photos: Path, reference: list[str]) -> None:
        with loaderkit.build(augmented(photos)) as loader:
            loader.set_epoch(2)
            assert loader.epoch == 2
            assert digests(loader) == reference[16:]
            loader.set_epoch(0)
            assert digests(loader) == reference[:8]

    def test_set_epoch_to_what_is_prefetched_does_not_read_again(self, photos: Path) -> None:
        with loaderkit.build(augmented(photos), overrides={"prefetch.batches": 16}) as loader:
            for epoch in range(3):
                loader.set_epoch(epoch)
                for _ in loader:
                    pass
            num_read = loader.stats().stages[0].num_items
        assert num_read <= 3 * 60 + 16 * 8, "prefetched batches were dropped and read again"

    def test_epochs_are_whole_numbers(self, photos: Path, reference: list[str]) -> None:
        """Numbers that print differently must not mean other orders, nor make a state that is no JSON."""

        for epoch in (np.int64(1), torch.tensor(1)):
            with loaderkit.build(augmented(photos)) as loader:
                loader.set_epoch(epoch)  # type: ignore[arg-type]
                assert digests(loader) == reference[8:16]
                json.dumps(loader.state_dict())
        with loaderkit.build(augmented(photos), rank=np.int64(0), world_size=np.int64(2)) as loader:  # type: ignore[arg-type]
            next(iter(loader))
            json.dumps(loader.state_dict())
            for wrong in (1.0, "1", True):
                with pytest.raises(TypeError):
                    loader.set_epoch(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="whole numbers"):
            loaderkit.build(augmented(photos), rank="0", world_size="1")  # type: ignore[arg-type]

    def test_a_newer_iteration_ends_the_older(self, photos: Path) -> None:
        with loaderkit.build(augmented(photos)) as loader:
            old = iter(loader)
            next(old)
            new = iter(loader)
            with pytest.raises(ClosedError, match="newer"):
                next(old)
            assert len(list(new)) == 8

    def test_classes_and_length(self, photos: Path) -> None:
        loader = loaderkit.build(augmented(photos))
        assert loader.classes == ["ant", "bee", "cat"]
        assert len(loader) == 8
        labels = torch.cat([batch["label"] for batch in loader])
        assert torch.bincount(labels).tolist() == [20, 20, 20]
        loader.close()

    def test_output_is_a_tuple_in_that_order(self, photos: Path) -> None:
        with loaderkit.build(augmented(photos).output("label", "image")) as loader:
            label, image = next(iter(loader))
        assert (label.shape, image.shape) == ((8,), (8, 3, 32, 32))
        with (
            pytest.raises(ConfigError, match="imagine"),
            loaderkit.build(augmented(photos).output("imagine")) as loader,
        ):
            next(iter(loader))

    def test_output_of_what_a_batch_lacks(self, photos: Path) -> None:
        pipeline = augmented(photos).call(lambda batch: batch).output("image", "made")
        with loaderkit.build(pipeline) as loader:
            with pytest.raises(ConfigError, match="made"):
                next(iter(loader))
            assert loader.state_dict()["position"] == 0
        tokens = Pipeline.dataset([{"x": torch.zeros(n)} for n in range(1, 5)]).read().batch(2, ragged={"x": "pad"})
        with loaderkit.build(tokens.output("x", "x_sizes")) as loader:
            assert all(x.shape == (2, int(sizes.max())) for x, sizes in loader)

    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("world_size", [1, 7])
    def test_output_has_marks_of_repeated_samples_if_it_names_them(
        self, photos: Path, world_size: int, drop_last: bool
    ) -> None:
        """One file serves any number of ranks, and `loaderkit check` is one rank."""
        plain = Pipeline.files(photos, label="parent", include="**/*.jpg").read().batch(4, drop_last=drop_last)
        for pipeline in (plain, plain.call(lambda batch: {"label": batch["label"]})):
            marks = []
            for rank in range(world_size):
                with loaderkit.build(
                    pipeline.output("label", "__wrapped__"), rank=rank, world_size=world_size
                ) as loader:
                    for label, wrapped in loader:
                        assert (wrapped.dtype, wrapped.shape) == (torch.bool, label.shape)
                        marks.append(wrapped)
            num_repeated = -60 % world_size if not drop_last else 0
            assert int(torch.cat(marks).sum()) == num_repeated

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("executor", ["thread", "process", "inline"])
    def test_keys_are_made_for_those_who_get_them(self, photos: Path, executor: str) -> None:
        plain = Pipeline.files(photos, include="**/*.jpg", label="parent").read().batch(7)
        made = plain.call(_with_keys)
        overrides = {"prefetch.executor": executor, "prefetch.concurrency": 2}

        def batches(pipeline: Pipeline) -> list[Any]:
            with loaderkit.build(pipeline, overrides=overrides) as loader:
                return list(loader)

        whole = batches(plain)
        keys = [batch["__key__"] for batch in whole]
        assert len({key for some in keys for key in some}) == 60
        assert batches(plain.output("__key__")) == [(some,) for some in keys]
        assert batches(made.output("copied")) == [(some,) for some in keys]
        assert [label.tolist() for (label,) in batches(plain.output("label"))] == [b["label"].tolist() for b in whole]

    def test_keys_that_are_not_delivered_are_not_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def keys(*_: Any) -> list[str]:
            raise AssertionError("nobody asked for them")

        monkeypatch.setattr(loaderkit.sources.objects.dataset.DatasetSource, "keys", keys)
        pipeline = Pipeline.dataset(list(range(6)), fields=["x"]).read().batch(3)
        with loaderkit.build(pipeline.output("x")) as loader:
            assert sorted(torch.cat([x for (x,) in loader]).tolist()) == list(range(6))
        with loaderkit.build(pipeline) as loader, pytest.raises(AssertionError, match="nobody"):
            next(iter(loader))

    def test_start_prefetches(self, photos: Path, reference: list[str]) -> None:
        with loaderkit.build(augmented(photos)) as loader:
            loader.start()
            assert any(thread.name.startswith("loaderkit") for thread in threading.enumerate())
            assert digests(loader) == reference[:8]


class TestDatasetObject:
    def test_a_torch_dataset(self) -> None:
        items = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
        with loaderkit.build(Pipeline.dataset(items, fields=["x", "y"]).shuffle(seed=1).read().batch(2)) as loader:
            batches = list(loader)
        assert sorted(int(y) for batch in batches for y in batch["y"]) == list(range(5))
        for batch in batches:
            assert torch.equal(batch["x"][:, 0], batch["y"] * 2.0)
            assert batch["__key__"] == [str(int(y)) for y in batch["y"]]

    def test_by_name(self) -> None:
        pipeline = {
            "source": {"kind": "dataset", "object": "builtins:range", "args": {}},
            "stages": ["read", {"batch": {"size": 2}}],
        }
        with pytest.raises(ConfigError, match=r"source\.object: 'builtins:range', called with \(\), failed: TypeError"):
            loaderkit.build(pipeline)
