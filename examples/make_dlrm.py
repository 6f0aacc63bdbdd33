"""Makes a file of clicks, for pipelines/dlrm.yaml: python examples/make_dlrm.py FOLDER [ROWS]"""

import argparse
from pathlib import Path

import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument(
    "num", type=int, nargs="?", default=100_000, metavar="ROWS", help="rows, 160 bytes each; default: %(default)s"
)
args = parser.parse_args()
folder, num = args.folder, args.num
folder.mkdir(parents=True, exist_ok=True)
rng = np.random.default_rng(0)
with open(folder / "clicks.bin", "wb") as file:
    for begin in range(0, num, 100_000):
        rows = np.empty((min(100_000, num - begin), 40), "<i4")
        rows[:, 1:14] = rng.geometric(0.1, (len(rows), 13)) - 1
        rows[:, 14:] = rng.zipf(1.3, (len(rows), 26)).clip(max=10**6) % 40_000
        rows[:, 0] = rng.random(len(rows)) < 1 / (1 + np.exp(3 - rows[:, 1] / 10))
        file.write(rows.tobytes())
print(f"{num} rows are in {folder / 'clicks.bin'}")
