"""Clips on their way through stages and batches: one draw a clip, the same from every executor, store and state."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executors import EXECUTORS
from media_files import frames_of, samples_of, sound, video, video_with_sound

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.errors import ConfigError, StageError
from loaderkit.pipeline.config.registry import STAGES
from loaderkit.samples.values import Clip, Image
from loaderkit.stages.media.clips import as_clip, each_frame
from loaderkit.stages.media.video import VideoArgs, frame_places
from loaderkit.stages.values import to_tensor

VIDEO = {"frames": 4, "stride": 2}
IMAGE_STAGES: dict[str, dict[str, Any]] = {
    "resize": {"size": [20, 30]},
    "center_crop": {"size": 24},
    "random_crop": {"size": [20, 28]},
    "random_resized_crop": {"size": 16},
    "random_horizontal_flip": {},
    "random_vertical_flip": {},
    "random_rotation": {"degrees": 30},
    "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2},
    "random_grayscale": {"p": 0.5},
    "gaussian_blur": {"kernel_size": 3},
    "random_erasing": {"p": 1.0, "value": "random"},
}
STAGES_OF_A_CLIP: list[Any] = [
    {"random_resized_crop": {"size": 24}}, "random_horizontal_flip", {"color_jitter": {"brightness": 0.4}},
]  # fmt: skip


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten videos in two folders."""
    root = tmp_path_factory.mktemp("videos")
    for number in range(10):
        place = root / "ab"[number % 2] / f"{number}.{('mp4', 'avi')[number % 3 == 0]}"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(video(place.suffix[1:], number, 14 + number))
    return root


def clips(url: Path | str, *more: Any, size: int = 4) -> dict[str, Any]:
    source = {"kind": "files", "url": str(url), "label": "parent"}
    stages = ["read", {"decode": {"video": VIDEO}}, *STAGES_OF_A_CLIP, {"batch": {"size": size}}, *more]
    return {"source": source, "stages": stages, "order": {"seed": 3}}


def batches(pipeline: Any, **more: Any) -> list[dict[str, Any]]:
    with loaderkit.build(pipeline, **more) as loader:
        return list(loader)


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for batch, other in zip(found, expected, strict=True):
        assert batch.keys() == other.keys()
        for name, value in other.items():
            same = torch.equal(batch[name], value) if isinstance(value, torch.Tensor) else batch[name] == value
            assert same, name


def drawn_sample(rng: random.Random) -> Clip:
    pixels = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (5, 32, 40, 3), np.uint8)
    return Clip(tuple(Image(frame) for frame in pixels))


@pytest.mark.parametrize("name", IMAGE_STAGES)
def test_a_stage_does_to_each_frame_what_it_does_to_an_image(name: str, rng: random.Random) -> None:
    kind = STAGES[name]
    assert kind.make is not None
    args = kind.args.model_validate(IMAGE_STAGES[name])
    function = kind.make(args)
    clip = drawn_sample(rng)
    for _ in range(3):
        draws = np.array([rng.random() for _ in range(kind.num_draws)])
        sample: dict[str, Any] = {"video": clip, "label": 3}
        run_jobs(each_frame(function, None)(sample, draws, {}))
        assert sample["label"] == 3
        for frame, before in zip(sample["video"].frames, clip.frames, strict=True):
            alone: dict[str, Any] = {"image": before}
            run_jobs(function(alone, draws, {}))
            assert np.array_equal(frame.pixels, alone["image"].pixels)


def run_jobs(jobs: Any) -> None:
    from loaderkit import native

    if jobs:
        native.resample(jobs)


def test_every_stage_of_images_is_tried() -> None:
    taking = {name for name, kind in STAGES.ours.items() if kind.needs_images and kind.make is not None}
    assert taking == {*IMAGE_STAGES}


def test_a_clip_beside_an_image_shares_its_draws(rng: random.Random) -> None:
    kind = STAGES["random_resized_crop"]
    clip = drawn_sample(rng)
    draws = np.array([rng.random() for _ in range(kind.num_draws)])
    for fields in (None, ("video", "image")):
        assert kind.make is not None
        function = each_frame(kind.make(kind.args.model_validate({"size": 16, "fields": fields})), fields)
        sample: dict[str, Any] = {"image": clip.frames[2], "video": clip}
        run_jobs(function(sample, draws, {}))
        assert np.array_equal(sample["image"].pixels, sample["video"].frames[2].pixels)


def test_what_is_taken_for_a_clip() -> None:
    frames = np.arange(2 * 3 * 6 * 8, dtype=np.uint8).reshape(2, 3, 6, 8)
    for value in (frames, torch.from_numpy(frames), frames.transpose(0, 2, 3, 1)):
        clip = as_clip(value)
        assert clip is not None
        assert torch.equal(to_tensor(clip), torch.from_numpy(frames))
    for other in (frames.astype(np.float32), frames[0], frames[:, :2], np.zeros((0, 3, 6, 8), np.uint8)):
        assert as_clip(other) is None
    with pytest.raises(ValueError, match=r"\[T, C, H, W\] or \[T, H, W, C\]"):
        as_clip(np.zeros((2, 3, 6, 3), np.uint8))


def test_frames_are_those_that_were_drawn(folder: Path) -> None:
    """As PyAV has them; and each epoch draws anew."""
    source = {"kind": "files", "url": str(folder)}
    pipeline = {"source": source, "stages": ["read", {"decode": {"video": VIDEO}}, {"batch": {"size": 1}}]}
    seen = set()
    with loaderkit.build(pipeline) as loader:
        for _ in range(3):
            for batch in loader:
                (key,), found = batch["__key__"], batch["video"][0].permute(0, 2, 3, 1).numpy()
                frames = frames_of((folder / key).read_bytes())
                span = frame_places(len(frames), VideoArgs(frames=4, stride=2), 0)
                starts = [n for n in range(len(frames) - span[-1]) if np.array_equal(frames[n], found[0])]
                assert len(starts) == 1
                assert all(np.array_equal(frames[starts[0] + place], found[i]) for i, place in enumerate(span))
                seen.add((key, starts[0]))
    assert len(seen) > 15


@pytest.mark.parametrize("name", EXECUTORS)
def test_the_same_from_every_executor(name: str, folder: Path) -> None:
    of_threads: list[list[Any]] = [[], [{"transfer": {"device": "cpu"}}, "normalize"]]
    for more in [["normalize"], *(of_threads if name in ("inline", "thread") else [])]:
        pipeline = clips(folder, *more)
        found = batches(pipeline, overrides=EXECUTORS[name])
        assert found[0]["video"].shape == (4, 4, 3, 24, 24)
        assert found[0]["video"].dtype == (torch.float32 if more else torch.uint8)
        assert_equal(found, batches(pipeline, overrides={"prefetch.executor": "inline"}))


def test_normalize_is_the_formula(folder: Path) -> None:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    levels = batches(clips(folder))[0]["video"]
    expected = (levels / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(batches(clips(folder, "normalize"))[0]["video"], expected, atol=1e-5, rtol=0)


def test_ranks_divide_and_a_state_resumes(folder: Path) -> None:
    whole = {
        key: row for batch in batches(clips(folder)) for key, row in zip(batch["__key__"], batch["video"], strict=True)
    }
    parts = [batches(clips(folder), rank=rank, world_size=2) for rank in range(2)]
    seen = [key for part in parts for batch in part for key in batch["__key__"]]
    assert {*seen} == {*whole}
    for part in parts:
        for batch in part:
            assert all(torch.equal(whole[key], row) for key, row in zip(batch["__key__"], batch["video"], strict=True))
    expected = batches(clips(folder))
    with loaderkit.build(clips(folder)) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loaderkit.build(clips(folder)) as loader:
        loader.load_state_dict(state)
        assert_equal(list(loader), expected[1:])


def test_from_memory_and_from_tar(folder: Path, tmp_path: Path) -> None:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}
    pipeline = clips("memory://")
    assert_equal(batches(pipeline, connectors={"memory": MemoryConnector(files)}), batches(clips(folder)))
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for key, data in files.items():
            info = tarfile.TarInfo(key)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    described = {**clips(""), "source": {"kind": "tar", "url": str(tmp_path / "x.tar")}, "order": {"shuffle": "none"}}
    described["stages"][1] = {"decode": {"video": {**VIDEO, "start": "first"}}}
    found = {
        key: row for batch in batches(described) for key, row in zip(batch["__key__"], batch["video"], strict=True)
    }
    assert len(found) == len(files)


def test_bad_ones_are_left_out_or_named(folder: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = (tmp_path / "1.mp4").read_bytes()
    (tmp_path / "1.mp4").write_bytes(data[: len(data) // 2])
    (tmp_path / "2.mp4").write_bytes(video("mp4", num=3))
    pipeline = Pipeline.files(str(tmp_path)).shuffle("none").read().decode(video=VIDEO).batch(10)
    with pytest.raises(StageError, match=r"1\.mp4.*it is cut"):
        batches(pipeline)
    (batch,) = batches(pipeline.errors(on_bad_sample="skip", max_bad_samples=2))
    assert not {"1.mp4", "2.mp4"} & {*batch["__key__"]}
    assert batch["video"].shape == (8, 4, 3, 48, 64)


def test_sizes_that_differ(tmp_path: Path) -> None:
    for number, size in enumerate([(48, 64), (64, 48)]):
        (tmp_path / f"{number}.avi").write_bytes(video("avi", size=size))
    pipeline = Pipeline.files(str(tmp_path)).shuffle("none").read().decode(video=VIDEO)
    with pytest.raises(StageError, match=r"clip uint8 \[4, 3, .*ragged"):
        batches(pipeline.batch(2))
    (batch,) = batches(pipeline.batch(2, ragged={"video": "list"}).normalize())
    assert [clip.shape for clip in batch["video"]] == [(4, 3, 48, 64), (4, 3, 64, 48)]
    assert batch["video"][0].dtype == torch.float32


def reversed_in_time(sample: dict[str, Any]) -> None:
    assert sample["video"].shape == (4, 3, 48, 64)
    sample["video"] = sample["video"].flip(0)


def test_a_call_gets_a_tensor_and_gives_a_clip(folder: Path) -> None:
    before = Pipeline.files(str(folder)).read().decode(video=VIDEO)
    plain = batches(before.center_crop(24).batch(10))[0]["video"]
    found = batches(before.call(f"{__name__}:reversed_in_time").center_crop(24).batch(10))[0]["video"]
    assert torch.equal(found, plain.flip(1))


def test_boxes_follow_once() -> None:
    items = [{"video": video("avi"), "boxes": np.array([[4, 6, 20, 30]], np.float32)}] * 2
    pipeline = Pipeline.dataset(items).read().decode(video=VIDEO, boxes={"boxes": "xyxy"}).resize([24, 32]).batch(2)
    (batch,) = batches(pipeline)
    assert batch["video"].shape == (2, 4, 3, 24, 32)
    assert batch["boxes"][0].tolist() == [[2, 3, 10, 15]]


def test_data_sets_of_arrays_and_bytes() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (4, 3, 48, 64), np.uint8)
    plain = Pipeline.dataset([{"x": frames, "y": 1}] * 2).read().center_crop(24).batch(2)
    assert torch.equal(batches(plain)[0]["x"][0], torch.from_numpy(frames[:, :, 12:36, 20:44].copy()))
    items = [{"a": video("mp4"), "b": sound("mp3", seconds=1.0), "c": b"bytes"}] * 2
    decoding = Pipeline.dataset(items).read().decode(video=VIDEO, audio={"seconds": 0.5})
    (batch,) = batches(decoding.batch(2))
    assert batch["a"].shape == (2, 4, 3, 48, 64)
    assert batch["b"].shape == (2, 1, 22050)
    assert batch["c"] == [b"bytes"] * 2


def test_video_and_its_sound(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.mp4").write_bytes(video_with_sound(number))
    audio = {"seconds": 0.5, "of_video": "audio", "length": "num_samples"}
    pipeline = Pipeline.files(str(tmp_path)).read().decode(video=VIDEO, audio=audio).batch(3)
    (batch,) = batches(pipeline)
    assert batch["num_samples"].tolist() == [8000] * 3
    for key, clip, samples in zip(batch["__key__"], batch["video"], batch["audio"], strict=True):
        data = (tmp_path / key).read_bytes()
        first = clip[0].permute(1, 2, 0).numpy()
        (place,) = [n for n, frame in enumerate(frames_of(data)) if np.array_equal(frame, first)]
        assert np.array_equal(samples.numpy(), samples_of(data)[0][:, place * 640 : place * 640 + 8000])
    (batch,) = batches(Pipeline.files(str(tmp_path)).read().decode(audio={"seconds": 0.5}).batch(3))
    assert batch["video"].shape == (3, 1, 8000)


def test_without_the_settings_they_stay_bytes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (batch, *_) = batches(Pipeline.files(str(folder)).read().decode().batch(2))
    assert isinstance(batch["video"][0], bytes)
    assert "`video: {frames: ...}`" in caplog.text


def test_what_the_description_refuses(folder: Path) -> None:
    files = Pipeline.files(str(folder), include="**/*.mp4").read()
    with pytest.raises(ConfigError, match=r"'video' is video|there is none"):
        batches(files.decode().center_crop(24).batch(2))
    with pytest.raises(ConfigError, match="not with `video`"):
        batches(files.decode(scaled=True, video=VIDEO).resize([24, 24]).batch(2))
    with pytest.raises(ConfigError, match="frames"):
        batches(files.decode(video={"stride": 2}).batch(2))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    import threading

    before = threading.active_count()
    yield
    assert threading.active_count() <= before
