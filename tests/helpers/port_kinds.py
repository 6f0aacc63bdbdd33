"""Training scripts of ten kinds, drawn: data sets, transforms, steps, workers. And the same loops over a pipeline."""

from __future__ import annotations

import random
from dataclasses import dataclass

_DATA = {
    "crops": "data_sets.ImageFolder({photos!r}, v2.Compose([v2.RandomResizedCrop({size}), v2.RandomHorizontalFlip(), *END]))",
    "resized": "data_sets.ImageFolder({photos!r}, v2.Compose([v2.Resize({size}), v2.CenterCrop({size}), *END]))",
    "colours": "data_sets.ImageFolder({photos!r}, v2.Compose([v2.Resize(({size}, {size})), v2.ColorJitter(0.3, 0.3), *END]))",
    "split": "random_split(data_sets.ImageFolder({photos!r}, v2.Compose([v2.RandomCrop({size}, pad_if_needed=True), *END])), "
    "[0.8, 0.2])[0]",
    "tensors": "TensorDataset(torch.randn({number}, {size}), torch.arange({number}))",
    "split tensors": "random_split(TensorDataset(torch.randn({number}, {size}), torch.arange({number})), [0.7, 0.3])[0]",
    "own": "drawn_data.computing",
    "own, waiting": "drawn_data.waiting",
    "arrow": "arrow({number}, {size})",
    "arrow, two files": "arrow({number}, {size}, 2)",
}
"""What a script iterates over."""

KINDS = tuple(_DATA)

_STEPS = {
    "none": "pass",
    "waits": "time.sleep({step_s})",
    "trains": "train()",
    "Python": "sum(n * n for n in range({loops}))",
}

MODULE = """
import hashlib
import time
import torch

class Samples:
    def __init__(self, number, loops, wait_s):
        self.number, self.loops, self.wait_s = number, loops, wait_s

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        time.sleep(self.wait_s)
        digest = hashlib.pbkdf2_hmac("sha256", b"%d" % index, b"", self.loops) if self.loops else bytes(32)
        return torch.tensor(list(digest), dtype=torch.float32), index

computing, waiting = Samples({number}, {loops}, 0.0), Samples({number}, 0, {wait_s})
"""

_SCRIPT = """
import random, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split
import drawn_data
{imports}

def arrow(number, size, num_files=1):
    import datasets
    rows = {{"ids": [[(n + k) % 99 for k in range(size)] for n in range(number)], "label": [*range(number)]}}
    datasets.Dataset.from_dict(rows).save_to_disk("saved", num_shards=num_files)
    return datasets.load_from_disk("saved").with_format("torch")

torch.set_num_threads(1)  # threads that wait for one another would time the other programs of the machine
model = torch.nn.Sequential(torch.nn.Linear({width}, {width}), torch.nn.ReLU(), torch.nn.Linear({width}, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
inputs = torch.randn({rows}, {width})

def train():
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()

def step():
    {step}

if __name__ == "__main__":
    torch.manual_seed(0)
    num_samples, begin_s = 0, 0.0
    {loop}
"""

_LOOP = """dataset = {data}
    loader = DataLoader(dataset, batch_size={batch}, shuffle={shuffle}, num_workers={workers})
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < {seconds}:
        for batch in loader:
            step()
            if time.perf_counter() - begin_s >= {seconds}:
                break
"""

_LOOP_OF_PIPELINE = """import loaderkit
    with loaderkit.build("pipeline.yaml") as loader:
        start_s, batches = time.perf_counter(), 0
        while begin_s == 0 or time.perf_counter() - begin_s < {measured_s}:
            for batch in loader:
                step()
                num_samples += {batch} if begin_s else 0
                if not begin_s and time.perf_counter() - start_s >= {settle_s}:
                    begin_s = time.perf_counter()
                if begin_s and time.perf_counter() - begin_s >= {measured_s}:
                    break
        print(num_samples / (time.perf_counter() - begin_s))
"""


@dataclass(frozen=True)
class DrawnScript:
    """A script with a DataLoader, and the same one with the pipeline that was written for it."""

    script: str
    with_pipeline: str
    module: str
    step: str
    has_pictures: bool


def drawn_script(kind: str, photos: str, rng: random.Random) -> DrawnScript:
    """One of a kind."""
    numbers = {
        "photos": photos, "size": rng.choice([24, 32, 48]), "number": rng.randint(800, 3000), "batch": rng.choice([8, 16, 32]),
        "shuffle": rng.random() < 0.5, "workers": rng.choice([0, 1, 2]), "step_s": rng.choice([0.002, 0.01, 0.03]),
        "loops": rng.choice([300, 2000]), "wait_s": rng.choice([0.001, 0.003]), "width": rng.choice([64, 256]),
        "rows": rng.choice([16, 256]), "seconds": 6, "measured_s": 6, "settle_s": 4,
    }  # fmt: skip
    step = rng.choice([*_STEPS])
    has_pictures = "data_sets" in _DATA[kind]
    imports = "from torchvision_transforms import data_sets, v2\n" if has_pictures else ""
    imports += "END = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]\n" if has_pictures else ""
    more = {"imports": imports, "step": _STEPS[step].format(**numbers), "data": _DATA[kind].format(**numbers)}
    loop, loop_of_pipeline = (text.format(**numbers, **more) for text in (_LOOP, _LOOP_OF_PIPELINE))
    return DrawnScript(
        _SCRIPT.format(**numbers, **more, loop=loop),
        _SCRIPT.format(**numbers, **more, loop=loop_of_pipeline),
        MODULE.format(**numbers),
        step,
        has_pictures,
    )
