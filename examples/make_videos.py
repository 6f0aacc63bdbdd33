"""Makes short videos in two classes, for pipelines/video.yaml: python examples/make_videos.py FOLDER [NUMBER]"""

import argparse
from pathlib import Path

import av
import numpy as np

FORMATS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("mp4", "libx264", {"preset": "ultrafast"}),
    ("mkv", "libx264", {"preset": "ultrafast", "g": "30"}),
    ("avi", "mpeg4", {}),
)
HEIGHT, WIDTH, NUM_FRAMES = 120, 160, 90

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("num", type=int, nargs="?", default=12, metavar="NUMBER", help="videos; default: %(default)s")
args = parser.parse_args()
folder, num = args.folder, args.num
for number in range(num):
    rng = np.random.default_rng(number)
    kind = ("left", "right")[number % 2]  # which way a square moves
    extension, codec, options = FORMATS[number // 2 % len(FORMATS)]
    path = folder / kind / f"{number:03}.{extension}"
    path.parent.mkdir(parents=True, exist_ok=True)
    background, square = rng.integers(0, 128, 3), rng.integers(128, 256, 3)
    top, begin = rng.integers(0, HEIGHT - 40), rng.integers(0, WIDTH)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for step in range(NUM_FRAMES):
            frame = np.full((HEIGHT, WIDTH, 3), background, np.uint8)
            left = (begin + (-2 if kind == "left" else 2) * step) % WIDTH
            frame[top : top + 40, left : left + 40] = square
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
print(f"{num} videos of {NUM_FRAMES} frames are in {folder}")
