"""Makes small scans with labels, for pipelines/unet3d.yaml and patches.yaml: python examples/make_volumes.py FOLDER [NUMBER]"""

import sys
from pathlib import Path

import nibabel
import numpy as np

folder, num = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8
for name in ("images", "labels"):
    (folder / name).mkdir(parents=True, exist_ok=True)
for number in range(num):
    rng = np.random.default_rng(number)
    shape = rng.integers(120, 180, 3)
    axes = np.meshgrid(*map(np.arange, shape), indexing="ij", sparse=True)
    ball = np.less(sum((axis - rng.integers(40, 80)) ** 2 for axis in axes), 30**2)
    scan = (100 * ball + rng.normal(0, 10, shape)).astype(np.int16)
    for kind, values in (("images", scan), ("labels", ball.astype(np.uint8))):
        nibabel.Nifti1Image(values, np.eye(4)).to_filename(folder / kind / f"case_{number:02}.nii.gz")
    print(f"case_{number:02}: {' x '.join(map(str, shape))}")
print(f"{num} scans are in {folder}")
