"""Makes short sounds in two classes, for pipelines/audio.yaml: python examples/make_sounds.py FOLDER [NUMBER]"""

import argparse
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

FORMATS = (
    ("wav", "pcm_s16le", 44100),
    ("flac", "flac", 48000),
    ("mp3", "libmp3lame", 44100),
    ("ogg", "libopus", 48000),
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("num", type=int, nargs="?", default=16, metavar="NUMBER", help="sounds; default: %(default)s")
args = parser.parse_args()
folder, num = args.folder, args.num
for number in range(num):
    rng = np.random.default_rng(number)
    kind = ("falling", "rising")[number % 2]  # which way the pitch goes
    extension, codec, rate = FORMATS[number // 2 % len(FORMATS)]
    path = folder / kind / f"{number:03}.{extension}"
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = rng.uniform(3, 8)
    time = np.arange(int(seconds * rate)) / rate
    change = 300 * (1 if kind == "rising" else -1) / seconds
    tone = 0.5 * np.sin(2 * np.pi * (rng.uniform(400, 900) + change / 2 * time) * time)
    samples = (tone + rng.normal(0, 0.01, (2, len(time)))).astype(np.float32)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
print(f"{num} sounds of 3 to 8 s are in {folder}")
