"""Makes small scans with labels, for pipelines/unet3d.yaml and patches.yaml: python examples/make_volumes.py FOLDER [NUMBER]"""

import argparse
from pathlib import Path

import nibabel
import numpy as np

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("num", type=int, nargs="?", default=8, metavar="NUMBER", help="scans; default: %(default)s")
args = parser.parse_args()
folder, num = args.folder, args.num
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
