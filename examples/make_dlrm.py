"""Makes a file of clicks, for pipelines/dlrm.yaml: python examples/make_dlrm.py FOLDER [ROWS]"""

import sys
from pathlib import Path

import numpy as np

folder, num = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
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
