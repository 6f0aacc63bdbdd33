"""Crops out of whole images in the place of decoded regions, and the trial that chooses between the two."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loaderkit
from loaderkit import Pipeline
from loaderkit.pipeline.execution_plan import compile_pipeline
from loaderkit.stages.image.dali import trial

Chain = Callable[[Pipeline], Pipeline]

CHAINS: dict[str, Chain] = {
    "a piece": lambda p: p.random_resized_crop(32).random_horizontal_flip().batch(8),
    "a window": lambda p: p.random_crop(40).batch(8),
    "normalised": lambda p: p.random_resized_crop([20, 28]).batch(8).normalize(mean=[0.0], std=[1 / 255]),
}


def source(folder: Path) -> Pipeline:
    return Pipeline.files(folder, include="**/*.jpg", label="parent").shuffle(seed=3).read()


def batches(folder: Path, chain: Chain, **decode: Any) -> list[dict[str, Any]]:
    with loaderkit.build(chain(source(folder).decode(**decode))) as loader:
        return list(loader)


class TestTheSameCrops:
    @pytest.mark.parametrize("chain", CHAINS)
    def test_whole_images_are_cropped_as_regions_are(self, photos: Path, chain: str) -> None:
        regions, whole = (
            batches(photos, CHAINS[chain], device="dali-cpu", regions=regions) for regions in (True, False)
        )
        for mine, other in zip(regions, whole, strict=True):
            assert mine["__key__"] == other["__key__"]
            difference = (mine["image"].double() - other["image"].double()).abs()
            assert difference.mean() < 0.5
            assert difference.flatten(1).mean(1).max() < 1.0, "it is another piece"

    def test_our_own_decoder_gives_the_same_bytes(self, photos: Path) -> None:
        regions, whole = (batches(photos, CHAINS["a piece"], regions=regions) for regions in (True, False))
        assert all(torch.equal(one["image"], other["image"]) for one, other in zip(regions, whole, strict=True))

    def test_a_state_goes_on_with_the_other_way(self, photos: Path) -> None:
        regions, whole = (CHAINS["a piece"](source(photos).decode(regions=regions)) for regions in (True, False))
        with loaderkit.build(regions) as loader:
            keys = [batch["__key__"] for _, batch in zip(range(3), loader, strict=False)]
            state = loader.state_dict()
        with loaderkit.build(whole) as loader:
            loader.load_state_dict(state)
            keys += [batch["__key__"] for batch in loader]
        assert keys == [batch["__key__"] for batch in batches(photos, CHAINS["a piece"])]


def graph_lines(folder: Path, chain: Chain, **decode: Any) -> list[str]:
    config = chain(source(folder).decode(**decode)).config
    lowering = compile_pipeline(config, rank=0, world_size=1).compiled.lowering
    assert lowering is not None
    return lowering.graph.lines()


class TestWhichWay:
    @pytest.fixture
    def tried(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The devices on which regions were tried, in vain."""
        devices: list[int] = []

        class Stream:
            device = torch.device("cuda", 1)

            def __init__(self, *args: Any) -> None: ...

            def run(self, act: Callable[..., Any], *args: Any) -> Any:
                return act(*args)

        def fail(device: int) -> bool:
            devices.append(device)
            return False

        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("loaderkit.stages.transfer.resolve_device", lambda wanted: Stream.device)
        monkeypatch.setattr("loaderkit.stages.transfer.TransferStream", Stream)
        monkeypatch.setattr("loaderkit.pipeline.dali_lowering.decodes_regions", fail)
        return devices

    def test_on_a_gpu_that_fails_on_regions_images_are_decoded_whole(self, photos: Path, tried: list[int]) -> None:
        lines = graph_lines(photos, lambda p: p.random_resized_crop(32).batch(8).transfer(), device="gpu")
        assert lines[:2] == ["decoders.image on mixed", "slice on gpu 1: random_resized_crop"]
        assert tried == [1]

    @pytest.mark.parametrize(
        ("chain", "decode"),
        [
            (lambda p: p.random_resized_crop(32), {"device": "gpu", "regions": True}),
            (lambda p: p.random_resized_crop(32), {"device": "gpu", "regions": False}),
            (lambda p: p.resize([32, 32]), {"device": "gpu"}),
            (lambda p: p.random_resized_crop(32), {"device": "dali-cpu"}),
        ],
    )
    def test_there_is_a_trial_only_where_it_decides(
        self, photos: Path, tried: list[int], chain: Chain, decode: dict[str, Any]
    ) -> None:
        def whole(pipeline: Pipeline) -> Pipeline:
            return chain(pipeline).batch(8).transfer()

        takes_region = "only the crop" in graph_lines(photos, whole, **decode)[0]
        assert tried == []
        assert takes_region == (decode.get("regions", decode["device"] == "dali-cpu"))


class TestTrial:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
        """Sets the GPU and version; a new cache directory."""
        monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))

        def be(name: str) -> None:
            monkeypatch.setattr(trial, "_machine", lambda device: name)

        be("one")
        return be

    def attempt(self, monkeypatch: pytest.MonkeyPatch, program: str) -> bool:
        monkeypatch.setattr(trial, "_PROGRAM", f"import os, signal, sys\n{program}")
        return trial.decodes_regions(0)

    WORKS = "print('whole images'); print('regions')"
    CRASHES = "print('whole images', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"

    def test_a_crash_is_survived_and_remembered(
        self, monkeypatch: pytest.MonkeyPatch, machine: Callable[[str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "loaderkit"):
            assert not self.attempt(monkeypatch, self.CRASHES)
            assert not self.attempt(monkeypatch, self.WORKS), "it is known already"
        assert len(caplog.records) == 2
        assert all("was killed by SIGSEGV" in record.getMessage() for record in caplog.records)
        machine("another driver")
        assert self.attempt(monkeypatch, self.WORKS)
        assert self.attempt(monkeypatch, self.CRASHES), "it is known already"

    @pytest.mark.parametrize("failing", ["sys.exit('out of memory')", "os.abort()", "print('regions'); sys.exit(3)"])
    def test_what_fails_for_other_reasons_is_tried_again(
        self, monkeypatch: pytest.MonkeyPatch, failing: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "loaderkit"):
            assert not self.attempt(monkeypatch, failing)
        assert "GPU 0 decodes whole" in caplog.text
        assert self.attempt(monkeypatch, self.WORKS)

    def test_an_error_of_the_decoder_counts_as_a_crash(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "loaderkit"):
            assert not self.attempt(monkeypatch, "print('whole images', flush=True); raise RuntimeError('failure 8')")
        assert "left with exit code 1 (RuntimeError: failure 8)" in caplog.text
        assert not self.attempt(monkeypatch, self.WORKS)

    def test_a_decoder_that_hangs_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trial, "_MOST_S", 0.5)
        assert not self.attempt(monkeypatch, "print('whole images', flush=True); signal.pause()")

    @pytest.mark.prove
    def test_dalis_own_regions_pass(self) -> None:
        """On the CPU, in another process, which finds what this one would import."""
        assert trial._tried(None) == ("", True)

    def test_other_pixels_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decoded = trial._decoded

        def moved(*args: Any, regions: bool) -> Any:
            crops = [crop._replace(top=0, left=0) for crop in args[2]] if regions else args[2]
            return decoded(args[0], args[1], crops, regions=regions)

        monkeypatch.setattr(trial, "_decoded", moved)
        with pytest.raises(RuntimeError, match="regions differ"):
            trial.attempt(None)
