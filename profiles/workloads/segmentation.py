"""JPEGs of 500 x 375 with masks of 21 classes, in batches of 8 of 256 x 256.

The peer's data set opens picture and mask by Pillow, and gives them to torchvision's transforms.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from profiles.workloads.vision import tv_tensors, v2
from profiles.workloads.work import WORKERS, Like, Work, photograph

BATCH, BATCHES, SIDE = 8, 50, 256
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def write(folder: Path, scale: float) -> int:
    num = max(1, round(BATCHES * scale))
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for number in range(num * BATCH):
        rng = np.random.default_rng(number)
        width, height = (500, 375) if rng.random() < 0.75 else (375, 500)
        photograph(rng, width, height).save(folder / f"images/{number:04}.jpg", quality=90)
        seeds = Image.fromarray(rng.integers(0, 21, (4, 5), np.uint8))  # patches of a class
        seeds.resize((width, height), Image.Resampling.NEAREST).rotate(rng.uniform(-20, 20)).save(
            folder / f"masks/{number:04}.png"
        )
    return num


class Classes(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, folder: Path) -> None:
        self.files = [(path, folder / f"masks/{path.stem}.png") for path in sorted((folder / "images").iterdir())]
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop((SIDE, SIDE), scale=(0.25, 1.0), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3),
                v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
                v2.Normalize(MEAN, STD),
                v2.ToPureTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image_path, mask_path = self.files[index]
        with Image.open(image_path) as file:
            image = v2.functional.to_image(file.convert("RGB"))
        with Image.open(mask_path) as file:
            mask = tv_tensors.Mask(torch.from_numpy(np.array(file))[None])
        found: dict[str, torch.Tensor] = self.transform({"image": image, "mask": mask})
        return found


def peers(folder: Path) -> dict[str, Iterable[Any]]:
    return {"torchvision": DataLoader(Classes(folder), BATCH, shuffle=True, drop_last=True, **WORKERS)}


FIELDS = {
    "image": Like(torch.float32, (BATCH, 3, SIDE, SIDE), -0.485 / 0.229, (1 - 0.406) / 0.225),
    "mask": Like(torch.uint8, (BATCH, 1, SIDE, SIDE), 0, 20),
}
WORK = Work("SEGMENTATION", BATCH, FIELDS, write, peers)
