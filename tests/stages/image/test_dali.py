"""Decoding through DALI's CPU backend: the samples, crops and flips of our own stages, and their policies for what is bad."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HELPERS, make_photo, write_photos
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError, StageError
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.samples.chunk import SampleChunk
from loaderkit.samples.values import Image
from loaderkit.stages.image.dali.renderer import Renderer
from loaderkit.stages.image.dali.trial import decodes_regions
from loaderkit.stages.image.ops import Crop, Flip, Scale, size_after

Chain = Callable[[Pipeline], Pipeline]

CHAINS: dict[str, Chain] = {
    "crop": lambda p: p.random_resized_crop(32).random_horizontal_flip().batch(8).normalize(),
    "resize": lambda p: p.resize(40).center_crop(32).batch(8).normalize(mean=[0.5], std=[0.25]),
    "exact size": lambda p: p.resize([24, 30], antialias=False).batch(8).normalize(dtype="float16"),
    "bicubic": lambda p: p.resize([24, 30], interpolation="bicubic").batch(8).normalize(dtype="float64"),
    "middle": lambda p: p.center_crop([200, 50]).batch(8).transfer("auto").normalize(),
    "padded": lambda p: p.random_crop(40, padding=8, fill=77, pad_if_needed=True).batch(8),
    "colours": lambda p: p.random_resized_crop(32).color_jitter(0.4, 0.4, 0.4, 0.1).random_horizontal_flip().batch(8),
    "colours first": lambda p: (
        p.resize(40)
        .color_jitter(saturation=0.8, contrast=0.5)
        .center_crop(32)
        .batch(8)
        .normalize(mean=[0.5], std=[0.25])
    ),
    "brightness alone": lambda p: p.center_crop(32).color_jitter(brightness=0.5).batch(8),
    "hue alone": lambda p: p.center_crop(32).color_jitter(hue=0.5).batch(8),
    "grey": lambda p: p.random_resized_crop(32).random_grayscale(0.5).random_horizontal_flip().batch(8),
    "no change": lambda p: p.random_resized_crop(32).color_jitter().batch(8),
    "mirrored first": lambda p: p.random_horizontal_flip(p=0.5).random_resized_crop([20, 28]).batch(8),
}


def source(folder: Path) -> Pipeline:
    return (
        Pipeline.files(folder, include="**/*.*", label="parent", fields={"image": "jpg;png;webp"})
        .shuffle(seed=3)
        .read()
    )


ON_A_GPU = pytest.param(
    "gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


@pytest.fixture(scope="session")
def has_regions() -> bool:
    """Tried once in all: a test's cache directory is its own, and a trial takes as long as several tests."""
    return not torch.cuda.is_available() or decodes_regions(0)


@pytest.fixture(autouse=True)
def one_trial(monkeypatch: pytest.MonkeyPatch, has_regions: bool) -> None:
    monkeypatch.setattr("loaderkit.pipeline.dali_lowering.decodes_regions", lambda device: has_regions)


def decoded_on(device: Any, folder: Path, chain: Chain) -> Pipeline:
    made = chain(source(folder).decode(device=device))
    return made.transfer("cuda") if device == "gpu" else made


def on_the_cpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def batches(folder: Path, device: str, chain: Chain, **overrides: Any) -> list[dict[str, Any]]:
    if device == "gpu":  # each batch ahead may build a pipeline, which takes seconds there
        overrides = {"prefetch.batches": 1} | overrides
    with loaderkit.build(decoded_on(device, folder, chain), overrides=overrides) as loader:
        return [on_the_cpu(batch) for batch in loader]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """To the last byte."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one["__key__"] == other["__key__"]
        assert torch.equal(one["image"], other["image"])


def levels(batch: dict[str, Any], chain: str) -> torch.Tensor:
    """Pixels in levels of 255, whatever was done to them."""
    images: torch.Tensor = batch["image"].double()
    if batch["image"].dtype == torch.uint8:
        return images
    if chain in ("resize", "colours first"):
        return images * (0.25 * 255) + 0.5 * 255
    mean, std = (
        torch.tensor(v, dtype=torch.float64)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    return (images * std + mean) * 255


class TestTheSame:
    @pytest.mark.parametrize("device", ["dali-cpu", ON_A_GPU])
    @pytest.mark.parametrize("chain", CHAINS)
    def test_samples_crops_and_flips_are_those_of_our_own_stages(self, photos: Path, chain: str, device: str) -> None:
        ours, theirs = (batches(photos, where, CHAINS[chain]) for where in ("cpu", device))
        assert len(ours) == len(theirs) == 8
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["__key__"] == other["__key__"]
            assert torch.equal(mine["label"], other["label"])
            assert (mine["image"].shape, mine["image"].dtype) == (other["image"].shape, other["image"].dtype)
            difference = (levels(mine, chain) - levels(other, chain)).abs()
            # On a GPU another decoder is at work as well.
            assert difference.mean() < (0.5 if device == "dali-cpu" else 2.0)
            assert difference.flatten(1).mean(1).max() < (1.0 if device == "dali-cpu" else 4.0), "it is another piece"

    @pytest.mark.parametrize("device", ["dali-cpu", ON_A_GPU])
    @pytest.mark.parametrize("executor", ["inline", "thread", "process"])
    def test_batches_are_exact_whatever_the_executor_and_after_resuming(
        self, photos: Path, executor: str, device: str
    ) -> None:
        if device == "gpu" and executor == "process":
            pytest.skip("another process cannot hand over tensors on a GPU")
        expected = batches(photos, device, CHAINS["crop"])
        pipeline = decoded_on(device, photos, CHAINS["crop"])
        overrides = {"prefetch.executor": executor, "prefetch.concurrency": 2}
        states, found = [], []
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            for batch in loader:
                found.append(on_the_cpu(batch))
                states.append(loader.state_dict())
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            for place, state in enumerate(states[:-1], 1):  # after each batch
                loader.load_state_dict(state)
                resumed = map(on_the_cpu, loader)
                assert_same([*found[:place], *resumed], expected)

    def test_batches_stay_as_they_were_delivered(self, photos: Path) -> None:
        with loaderkit.build(CHAINS["crop"](source(photos).decode(device="dali-cpu"))) as loader:
            kept = [(batch["image"], batch["image"].clone()) for _ in range(3) for batch in loader]
        assert all(torch.equal(image, copy) for image, copy in kept)

    def test_samples_of_a_tar_with_other_fields(self, shards: Path) -> None:
        pipeline = Pipeline.tar(shards).read()
        ours, theirs = (
            list(loaderkit.build(pipeline.decode(device=device).resize([24, 24]).batch(16)))
            for device in ("cpu", "dali-cpu")
        )
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys()
            assert torch.equal(mine["label"], other["label"])


class TestSteps:
    """What DALI is told is what our stages do."""

    @given(
        st.sampled_from(["center_crop", "random_crop", "random_resized_crop", "random_horizontal_flip", "resize"]),
        st.integers(1, 60),
        st.integers(1, 60),
        st.tuples(st.integers(1, 70), st.integers(1, 70)),
        st.integers(0, 2**32 - 1),
    )
    def test_they_agree(self, kind: str, height: int, width: int, size: tuple[int, int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        pixels = rng.integers(1, 255, (height, width, 3), np.uint8)
        given_args: dict[str, dict[str, Any]] = {
            "random_horizontal_flip": {"p": 0.5},
            "random_crop": {"size": size, "padding": 3, "pad_if_needed": True, "fill": 9},
        }
        stage = STAGES[kind]
        args = stage.args(**given_args.get(kind, {"size": size}))
        draws = rng.random(stage.num_draws)
        assert stage.ops is not None
        assert stage.make is not None
        sample = {"image": Image(pixels)}
        stage.make(args)(sample, draws, None)
        steps = stage.ops(args).of(height, width, draws)
        assert size_after(steps, height, width) == sample["image"].pixels.shape[:2]
        found = pixels
        for step in steps:
            if isinstance(step, Crop):
                found = window(found, step, stage.ops(args).fill)
            elif isinstance(step, Flip):
                found = found[:, ::-1] if step.is_on else found
            else:
                assert isinstance(step, Scale)
                return  # pixels are compared above
        assert np.array_equal(found, sample["image"].pixels)


def window(pixels: np.ndarray[Any, Any], crop: Crop, fill: int) -> np.ndarray[Any, Any]:
    """A crop that may reach beyond the image, one pixel at a time."""
    found = np.full((crop.height, crop.width, 3), fill, np.uint8)
    for row in range(crop.height):
        for column in range(crop.width):
            y, x = row + crop.top, column + crop.left
            if 0 <= y < pixels.shape[0] and 0 <= x < pixels.shape[1]:
                found[row, column] = pixels[y, x]
    return found


class TestOtherFormats:
    @pytest.fixture
    def mixed(self, tmp_path: Path) -> Path:
        folder = write_photos(tmp_path / "mixed", 6)
        picture = Pillow.open(io.BytesIO(make_photo(7)))
        place = folder / "ant"
        picture.save(place / "a.png")
        picture.save(place / "b.webp", lossless=True)
        picture.convert("CMYK").save(place / "c.jpg")
        picture.convert("L").save(place / "d.jpg")
        picture.save(place / "e.jpg", progressive=True)
        picture.convert("P").save(place / "f.png")
        picture.convert("RGBA").save(place / "g.png")
        return folder

    @pytest.mark.parametrize("device", ["dali-cpu", ON_A_GPU])
    @pytest.mark.parametrize("chain", ["crop", "padded"])
    def test_every_format_is_served_in_its_batch(self, mixed: Path, chain: str, device: str) -> None:
        ours, theirs = (batches(mixed, where, CHAINS[chain]) for where in ("cpu", device))
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["__key__"] == other["__key__"]
            difference = (levels(mine, chain) - levels(other, chain)).abs().flatten(1).mean(1).max()
            assert difference < (1.5 if device == "dali-cpu" else 4.0)


@pytest.mark.parametrize("device", ["dali-cpu", ON_A_GPU])
class TestDamaged:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = write_photos(tmp_path / "photos", 64)
        for index, damage in (
            (5, lambda d: d[: len(d) // 2]),
            (20, lambda d: b"no picture"),
            (41, lambda d: d[:200] + d[400:]),
        ):
            place = next(folder.glob(f"*/{index:03}.jpg"))
            place.write_bytes(damage(place.read_bytes()))
        return folder

    def chain(self, pipeline: Pipeline) -> Pipeline:
        return pipeline.random_resized_crop(32).random_horizontal_flip().batch(64).normalize()

    def bad(self, folder: Path, device: str) -> set[str]:
        with loaderkit.build(
            decoded_on(device, folder, self.chain),
            overrides={"errors.on_bad_sample": "skip", "prefetch.executor": "inline"},
        ) as loader:
            (batch,) = loader
            assert len(batch["image"]) == len(batch["__key__"]) == len(batch["label"])
            everything = {f"{kind}/{n:03}.jpg" for n, kind in enumerate(["ant", "bee", "cat"] * 22) if n < 64}
            return everything - set(batch["__key__"])

    def test_skip_leaves_out_those_that_our_decoder_leaves_out(self, folder: Path, device: str) -> None:
        bad = self.bad(folder, device)
        assert {"cat/005.jpg", "cat/020.jpg"} <= bad
        assert bad == self.bad(folder, "cpu")

    def test_raise_names_the_sample_as_our_decoder_does(self, folder: Path, device: str) -> None:
        messages = []
        for where in ("cpu", device):
            with pytest.raises(StageError) as caught:
                batches(folder, where, self.chain)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]

    def test_replace_takes_the_same_samples_instead(self, folder: Path, device: str) -> None:
        ours, theirs = (
            batches(folder, where, self.chain, **{"errors.on_bad_sample": "replace"}) for where in ("cpu", device)
        )
        assert ours[0]["__key__"] == theirs[0]["__key__"]
        assert len(theirs[0]["image"]) == 64
        difference = (levels(ours[0], "crop") - levels(theirs[0], "crop")).abs().flatten(1).mean(1)
        assert difference.max() < (1.0 if device == "dali-cpu" else 4.0)
        assert bool(theirs[0]["image"].isfinite().all())

    def test_the_pipeline_goes_on_with_the_next_batch(self, folder: Path, device: str) -> None:
        pipeline = decoded_on(device, folder, lambda made: made.resize([16, 16]).batch(8))
        with loaderkit.build(pipeline, overrides={"errors.on_bad_sample": "skip"}) as loader:
            for _ in range(3):
                assert sum(len(batch["image"]) for batch in loader) == 64 - len(self.bad(folder, "cpu"))

    def test_a_name_that_dali_made_up(self, folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        run, made_up = Renderer._run, [RuntimeError("Failed to decode sample #9999 :")]
        monkeypatch.setattr(Renderer, "_run", lambda *args: made_up.pop() if made_up else run(*args))
        assert self.bad(folder, device) == self.bad(folder, "cpu")
        assert not made_up

    def test_only_those_that_dali_names_are_looked_at_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
    ) -> None:
        """As long as they are few, since one thread looks at them."""
        if device == "gpu":
            pytest.skip("what a GPU's decoder says of which image is not known")
        folder = write_photos(tmp_path / "photos", 64)
        places = {f"{index:03}": next(folder.glob(f"*/{index:03}.jpg")) for index in (5, 20, 41)}
        for place in places.values():
            before = place.read_bytes()
            place.write_bytes(before.replace(b"\xff\xdb", b"\xff\xe5"))  # its tables are taken for something else
            assert place.read_bytes() != before
        looked_at: list[int] = []
        is_whole = Renderer.is_whole

        def count(renderer: Renderer, chunk: SampleChunk, place: int, field: str) -> bool:
            looked_at.append(place)
            return is_whole(renderer, chunk, place, field)

        monkeypatch.setattr(Renderer, "is_whole", count)
        assert self.bad(folder, device) == {f"{place.parent.name}/{place.name}" for place in places.values()}
        assert len(looked_at) == 3
        for index in (6, 7, 8):
            next(folder.glob(f"*/{index:03}.jpg")).write_bytes(places["005"].read_bytes())
        looked_at.clear()
        assert self.bad(folder, device) == self.bad(folder, "cpu")
        assert len(looked_at) == 3 + 61, "three by name, and then all that are left"


class TestRefused:
    @pytest.mark.parametrize(
        ("decode", "stages", "said"),
        [
            ({}, [{"color_jitter": {"hue": 0.1}}, {"resize": {"size": 8}}], "put it after a crop or resize"),
            ({}, [{"call": {"function": "json:dumps"}}], "put it after `batch`"),
            ({}, [{"resize": {"size": 8, "interpolation": "nearest"}}], "nearest takes other pixels inside DALI"),
            ({"scaled": True}, [{"resize": {"size": 8}}], "not with `device: dali-cpu`"),
            ({"exif_orientation": True}, [{"resize": {"size": 8}}], "not with `device: dali-cpu`"),
            ({}, [{"resize": {"size": 8, "fields": ["image"]}}], "the same to all images that it decodes"),
        ],
    )
    def test_what_dali_cannot_do(self, photos: Path, decode: dict[str, Any], stages: list[Any], said: str) -> None:
        description = {
            "source": {"kind": "files", "url": str(photos), "include": "**/*.jpg"},
            "stages": ["read", {"decode": {"device": "dali-cpu", **decode}}, *stages, {"batch": {"size": 4}}],
        }
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            loaderkit.build(description)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there(self, photos: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"decode.device: gpu: torch .* sees no CUDA device: use `cpu`, or `dali-cpu`"
        ):
            loaderkit.build(CHAINS["crop"](source(photos).decode(device="gpu")))

    def test_without_dali_the_extra_is_named(self, photos: Path) -> None:
        program = (
            "import sys; sys.modules['nvidia.dali'] = None\n"
            "import loaderkit\n"
            f"p = loaderkit.Pipeline.files({str(photos)!r}).read().decode(device='dali-cpu').resize([8, 8]).batch(4)\n"
            "try:\n    loaderkit.build(p)\nexcept loaderkit.errors.ConfigError as error:\n    print(error)"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert "pip install 'loaderkit[dali]'" in run.stdout

    @pytest.mark.prove
    def test_our_own_decoder_does_not_import_it(self, photos: Path) -> None:
        program = (
            "import sys, loaderkit\n"
            f"p = loaderkit.Pipeline.files({str(photos)!r}).read().decode().resize([8, 8]).batch(4)\n"
            "next(iter(loaderkit.build(p)))\n"
            "assert not any(name.startswith('nvidia') for name in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


def test_explain_shows_the_graph(photos: Path) -> None:
    with loaderkit.build(CHAINS["crop"](source(photos).decode(device="dali-cpu"))) as loader:
        assert loader.stats().to_dict()["tuning"]["graph"] == [
            "decoders.image_slice (only the crop) on cpu",
            "resize on cpu: random_resized_crop",
            "crop_mirror_normalize on cpu: random_horizontal_flip, normalize, batch",
        ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    def test_batches_stay_as_they_were_delivered(self, photos: Path) -> None:
        pipeline = source(photos).decode(device="gpu").resize([64, 64]).batch(8).transfer("cuda").normalize()
        with loaderkit.build(pipeline) as loader:
            kept = [(batch["image"], batch["image"].clone()) for _ in range(3) for batch in loader]
        torch.cuda.synchronize()
        assert all(torch.equal(image, copy) for image, copy in kept)


@pytest.mark.prove
def test_fifty_epochs_with_rebuilds_do_not_grow(photos: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def epoch() -> None:
        assert len(batches(photos, "dali-cpu", CHAINS["crop"], **{"prefetch.concurrency": 2})) == 8
        gc.collect()

    for _ in range(10):
        epoch()
    before = resident_bytes()
    for _ in range(40):
        epoch()
    assert resident_bytes() - before < 32 * 2**20


def test_a_state_goes_on_with_another_decoder(photos: Path) -> None:
    ours, theirs = (CHAINS["crop"](source(photos).decode(device=device)) for device in ("cpu", "dali-cpu"))
    with loaderkit.build(ours) as loader:
        keys = [batch["__key__"] for _, batch in zip(range(3), loader, strict=False)]
        state = loader.state_dict()
    with loaderkit.build(theirs) as loader:
        loader.load_state_dict(state)
        keys += [batch["__key__"] for batch in loader]
    assert keys == [batch["__key__"] for batch in batches(photos, "cpu", CHAINS["crop"])]


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_cost_their_sample_at_most(tmp_path: Path, seed: int) -> None:
    """In another process, as what goes wrong in a decoder may end it."""
    program = f"""
import io, sys
import numpy as np
sys.path[:0] = {[*map(str, (HELPERS.parent, HELPERS, Path(__file__).parent))]!r}
from conftest import make_photo
import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
rng = np.random.default_rng({seed})
for _ in range(100):
    files = {{f"{{n:02}}.jpg": make_photo(n) for n in range(16)}}
    for key in ("03.jpg", "11.jpg"):
        data = bytearray(files[key])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(2, 700 if rng.random() < 0.8 else len(data)))] = int(rng.integers(256))
        files[key] = bytes(data)
    pipeline = Pipeline.files("memory://", include="*.jpg").read().decode(device="dali-cpu", max_pixels=10**6)
    pipeline = pipeline.resize([16, 16]).batch(16)
    overrides = {{"errors.on_bad_sample": "skip", "prefetch.executor": "inline", "order.epochs": 1}}
    with loaderkit.build(pipeline, connectors={{"memory": MemoryConnector(files)}}, overrides=overrides) as loader:
        (batch,) = loader
        assert set(files) - {{"03.jpg", "11.jpg"}} <= set(batch["__key__"])
print("whole")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "whole"
