"""Video and sound against torch's DataLoader, whose data set decodes the same by PyAV, with two workers.

    python -m profiles.media [--kind video] [--rounds 7] [--files 24] [--out profiles/results]

Videos are H.264 as x264 makes it, 340 x 256, 10 s at 30 frames a second; clips of 16 frames, every fourth, at a random place,
cropped and resized to 112 or 224, mirrored and normalised. Sounds are FLAC and MP3 of 30 s; windows of 4 s at 16 kHz. The data
set does as one who knows PyAV: it seeks to the keyframe before the clip, decodes up to its last frame, and converts those that
are wanted. All from the page cache. The loaders take turns, an epoch each from its first batch on, each first in every other
round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import loaderkit
from loaderkit import Pipeline
from profiles.record import record

FRAMES, STRIDE, SECONDS, RATE = 16, 4, 4, 16000
TIMES = 8  # every file is there so often: an epoch has more batches than are prepared ahead
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))


def write_videos(folder: Path, num: int) -> None:
    for number in range(num):
        rng = np.random.default_rng(number)
        ground = rng.integers(0, 255, (24, 32, 3)).repeat(24, 0).repeat(24, 1) + rng.integers(0, 20, (576, 768, 1))
        thing = rng.integers(0, 255, (64, 64, 3), np.uint8)
        with av.open(str(folder / f"{number:03}.mp4"), "w") as out:
            stream: Any = out.add_stream("libx264", rate=30, options={"preset": "veryfast"})
            stream.width, stream.height, stream.pix_fmt = 340, 256, "yuv420p"
            for step in range(300):
                top, left = int(100 + 90 * np.sin(step / 30)), int(100 + 90 * np.cos(step / 23))
                frame = ground[top : top + 256, left : left + 340].clip(0, 255).astype(np.uint8)
                frame[step % 180 : step % 180 + 64, 2 * step % 250 : 2 * step % 250 + 64] = thing
                out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            out.mux(stream.encode(None))


def write_sounds(folder: Path, num: int) -> None:
    rate = 44100
    for number in range(num):
        rng, place = np.random.default_rng(number), np.arange(30 * rate) / rate
        tones = [np.sin(2 * np.pi * rng.uniform(100, 2000) * place * (1 + 0.01 * place)) for _ in range(2)]
        samples = (0.4 * np.stack(tones) + rng.normal(0, 0.02, (2, len(place)))).astype(np.float32)
        extension, codec = (("flac", "flac"), ("mp3", "libmp3lame"))[number % 2]
        with av.open(str(folder / f"{number:03}.{extension}"), "w") as out:
            stream = out.add_stream(codec, rate=rate, layout="stereo")
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
            out.mux(stream.encode(frame))
            out.mux(stream.encode(None))


class Clips(Dataset[torch.Tensor]):
    """As one writes it with PyAV."""

    def __init__(self, folder: Path, size: int) -> None:
        self.paths, self.size = sorted(folder.iterdir()), size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        rng = np.random.default_rng()
        span = (FRAMES - 1) * STRIDE + 1
        found: list[Any] = []
        with av.open(str(self.paths[index])) as container:
            stream: Any = container.streams.video[0]
            stream.thread_count = 1
            first = int(rng.integers(0, stream.frames - span + 1))
            step = 1 / (stream.average_rate * stream.time_base)
            wanted = {int((first + place * STRIDE) * step) for place in range(FRAMES)}
            container.seek(int(first * step), stream=stream)
            for frame in container.decode(stream):
                if frame.pts in wanted:
                    found.append(frame.to_ndarray(format="rgb24"))
                    if len(found) == FRAMES:
                        break
        clip = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)
        height, width = clip.shape[2:]
        side = int(min(height, width) * rng.uniform(0.7, 1))
        top, left = int(rng.integers(0, height - side + 1)), int(rng.integers(0, width - side + 1))
        clip = torch.nn.functional.interpolate(
            clip[:, :, top : top + side, left : left + side], size=(self.size,) * 2, mode="bilinear", antialias=True
        )
        if rng.random() < 0.5:
            clip = clip.flip(-1)
        return (clip.float().div_(255) - MEAN) / STD


class Windows(Dataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        parts: list[Any] = []
        with av.open(str(self.paths[index])) as container:
            stream = container.streams.audio[0]
            assert stream.duration is not None
            assert stream.time_base is not None
            length = float(stream.duration * stream.time_base)
            start = np.random.default_rng().uniform(0, length - SECONDS)
            container.seek(int(start / stream.time_base), stream=stream)
            resampler, num = av.AudioResampler(format="fltp", layout="mono", rate=RATE), 0
            for frame in container.decode(stream):
                parts += [part.to_ndarray() for part in resampler.resample(frame)]
                num = sum(part.shape[1] for part in parts)
                if num >= SECONDS * RATE:
                    break
            samples = np.concatenate(parts, 1)[:, : SECONDS * RATE]
        return torch.from_numpy(np.pad(samples, ((0, 0), (0, SECONDS * RATE - samples.shape[1]))))


def epoch(batches: Iterable[Any], take: Callable[[Any], torch.Tensor]) -> float:
    """Samples a second, from the first batch on."""
    num, begin_s = 0, None
    for batch in batches:
        if begin_s is None:
            begin_s = time.perf_counter()
        else:
            num += len(take(batch))
    assert begin_s is not None
    return num / (time.perf_counter() - begin_s)


def measure(kind: str, size: int, num_rounds: int, num_files: int) -> dict[str, Any]:
    turns: dict[str, list[float]] = {"loaderkit": [], "torch": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (write_videos if kind == "video" else write_sounds)(folder, num_files)
        for path in list(folder.iterdir()):
            for number in range(1, TIMES):
                path.with_stem(f"{path.stem}-{number}").hardlink_to(path)
        read = Pipeline.files(folder).shuffle(seed=0).read()
        if kind == "video":
            described = read.decode(video={"frames": FRAMES, "stride": STRIDE})
            described = (
                described.random_resized_crop(size, scale=(0.5, 1.0)).random_horizontal_flip().batch(4).normalize()
            )
        else:
            described = read.decode(audio={"rate": RATE, "seconds": SECONDS}).batch(4)
        data: Dataset[torch.Tensor] = Clips(folder, size) if kind == "video" else Windows(folder)
        others = DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
        for number in range(num_rounds):
            for who in sorted(turns, reverse=number % 2 == 1):
                if who == "torch":
                    turns[who].append(epoch(others, lambda batch: batch))
                    continue
                with loaderkit.build(described.epochs(1)) as loader:
                    turns[who].append(epoch(loader, lambda batch: batch[kind]))
    ratios = [ours / theirs for ours, theirs in zip(turns["loaderkit"], turns["torch"], strict=True)]
    return {"kind": kind, "size": size, "ratio": statistics.median(ratios), "ratios": ratios, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=("video", "audio"))
    parser.add_argument("--size", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for kind in options.kind or ("video", "audio"):
        for size in (options.size or [112, 224]) if kind == "video" else [0]:
            found.append(measure(kind, size, options.rounds, options.files))
            print(json.dumps(found[-1]))
    record(options.out, "media", rounds=options.rounds, found=found)


if __name__ == "__main__":
    main()
