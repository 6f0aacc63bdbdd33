"""Makes MDS shards of small pictures in three classes, without mosaicml-streaming:
python examples/make_mds.py FOLDER [NUMBER]"""

import argparse
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("num", type=int, nargs="?", default=128, metavar="NUMBER", help="pictures; default: %(default)s")
args = parser.parse_args()
folder, num = args.folder, args.num
SIZE = 32  # samples of a shard
LABEL_BYTES = 8


def drawn(number: int) -> bytes:
    """A sample: the size of its JPEG, uint32, for which the index has none; the JPEG; its label, int64."""
    rng, label = np.random.default_rng(number), number % 3
    pixels = rng.integers(0, 100, (64, 64, 3), np.uint8)
    pixels[..., label] += 120  # red, green or blue
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    jpeg = file.getvalue()
    return np.uint32(len(jpeg)).tobytes() + jpeg + np.int64(label).tobytes()


folder.mkdir(parents=True, exist_ok=True)
columns = {"column_names": ["image", "label"], "column_encodings": ["jpeg", "int"], "column_sizes": [None, LABEL_BYTES]}
shards = []
for first in range(0, num, SIZE):
    samples = [drawn(number) for number in range(first, min(first + SIZE, num))]
    head = json.dumps(columns).encode()
    begin = 4 * (len(samples) + 2) + len(head)  # behind the number of samples, the offsets and the columns
    offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4").tobytes()
    data = np.uint32(len(samples)).tobytes() + offsets + head + b"".join(samples)
    name = f"shard.{first // SIZE:05}.mds"
    (folder / name).write_bytes(data)
    stored = {"basename": name, "bytes": len(data), "hashes": {}}
    of_shard = {"format": "mds", "version": 2, "samples": len(samples), "size_limit": 1 << 26, "hashes": []}
    shards.append({**columns, **of_shard, "raw_data": stored, "zip_data": None, "compression": None})
(folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
print(f"{num} pictures are in {len(shards)} shards in {folder}")
