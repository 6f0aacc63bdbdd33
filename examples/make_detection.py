"""Makes pictures with boxes, classes and masks, for pipelines/detection.yaml:
python examples/make_detection.py FOLDER [NUMBER]"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("num", type=int, nargs="?", default=64, metavar="NUMBER", help="pictures; default: %(default)s")
args = parser.parse_args()
folder, num = args.folder, args.num
for name in ("images", "masks", "targets"):
    (folder / name).mkdir(parents=True, exist_ok=True)
for number in range(num):
    rng = np.random.default_rng(number)
    height, width = (int(side) for side in rng.integers(300, 500, 2))
    picture = Image.fromarray(rng.integers(0, 100, (height, width, 3), np.uint8))
    mask = Image.new("L", (width, height))
    labels = rng.integers(1, 3, rng.integers(1, 6))  # 1: a disc, 2: a rectangle
    for instance, label in enumerate(labels, 1):
        side = rng.integers(40, 150)
        left, top = int(rng.integers(0, width - 40)), int(rng.integers(0, height - 40))
        corners = (left, top, left + int(side), top + int(side))
        for canvas, colour in ((picture, tuple(map(int, rng.integers(120, 256, 3)))), (mask, instance)):
            draw = ImageDraw.Draw(canvas)
            (draw.ellipse if label == 1 else draw.rectangle)(corners, fill=colour)
    seen = np.asarray(mask)  # of what lies behind others only that which shows
    kept = [instance for instance in range(1, len(labels) + 1) if (seen == instance).any()]
    places = [np.nonzero(seen == instance) for instance in kept]
    boxes = [[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] for rows, columns in places]
    picture.save(folder / f"images/{number:04}.jpg", quality=90)
    mask.save(folder / f"masks/{number:04}.png")
    chosen = labels[np.array(kept) - 1]
    np.savez(folder / f"targets/{number:04}.npz", boxes=np.array(boxes, np.float32), labels=chosen)
print(f"{num} pictures are in {folder}")
