"""Makes pictures with masks of classes, for pipelines/segmentation.yaml:
python examples/make_segmentation.py FOLDER [NUMBER]"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("num", type=int, nargs="?", default=64, metavar="NUMBER", help="pictures; default: %(default)s")
args = parser.parse_args()
folder, num = args.folder, args.num
for name in ("images", "masks"):
    (folder / name).mkdir(parents=True, exist_ok=True)
COLOURS = np.array([[90, 140, 220], [60, 140, 60], [120, 120, 120]])  # sky, meadow, road
for number in range(num):
    rng = np.random.default_rng(number)
    height, width = (int(side) for side in rng.integers(280, 420, 2))
    rows, columns = np.mgrid[:height, :width]
    horizon = height * rng.uniform(0.3, 0.6) + 10 * np.sin(columns / rng.uniform(10, 40))
    classes = (rows > horizon).astype(np.uint8)
    classes[(rows > horizon) & (abs(columns - width / 2) < (rows - height * 0.3) / 2)] = 2
    noise = rng.normal(0, 10, (height, width, 3))
    Image.fromarray((COLOURS[classes] + noise).clip(0, 255).astype(np.uint8)).save(folder / f"images/{number:04}.jpg")
    Image.fromarray(classes).save(folder / f"masks/{number:04}.png")
print(f"{num} pictures are in {folder}")
