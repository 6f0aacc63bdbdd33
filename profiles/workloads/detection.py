"""Boxes, classes and masks of two to seven objects in JPEGs of 640 x 480, in batches of 4 of 320 x 320.

The peer's data set opens picture and mask by Pillow, and gives them to torchvision's transforms as its tutorial on detection
does.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import DataLoader, Dataset

from profiles.workloads.vision import tv_tensors, v2
from profiles.workloads.work import WORKERS, Like, Work, photograph

BATCH, BATCHES, SIDE = 4, 80, 320


def write(folder: Path, scale: float) -> int:
    num = max(1, round(BATCHES * scale))
    for name in ("images", "masks", "targets"):
        (folder / name).mkdir()
    for number in range(num * BATCH):
        rng = np.random.default_rng(number)
        width, height = (640, 480) if rng.random() < 0.75 else (480, 640)
        mask = Image.new("L", (width, height))
        for instance in range(1, rng.integers(3, 9)):
            left, top, across, down = (
                int(rng.integers(*ends)) for ends in ((0, width - 60), (0, height - 60), (40, 300), (40, 300))
            )
            ImageDraw.Draw(mask).ellipse((left, top, left + across, top + down), fill=instance)
        numbers = np.asarray(mask)
        kept = [one for one in range(1, numbers.max() + 1) if (numbers == one).any()]
        places = [np.nonzero(numbers == one) for one in kept]
        boxes = [[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] for rows, columns in places]
        photograph(rng, width, height).save(folder / f"images/{number:04}.jpg", quality=90)
        mask.save(folder / f"masks/{number:04}.png")
        labels = rng.integers(1, 91, len(kept))
        np.savez(folder / f"targets/{number:04}.npz", boxes=np.array(boxes, np.float32), labels=labels)
    return num


class Objects(Dataset[dict[str, Any]]):
    def __init__(self, folder: Path) -> None:
        self.files = [
            (path, folder / f"masks/{path.stem}.png", folder / f"targets/{path.stem}.npz")
            for path in sorted((folder / "images").iterdir())
        ]
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop((SIDE, SIDE), scale=(0.3, 1.0), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(brightness=0.2, contrast=0.2),
                v2.ClampBoundingBoxes(),
                v2.SanitizeBoundingBoxes(min_size=2),
                v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
                v2.ToPureTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image_path, mask_path, target_path = self.files[index]
        with Image.open(image_path) as file:
            image = v2.functional.to_image(file.convert("RGB"))
        with Image.open(mask_path) as file:
            numbers = torch.from_numpy(np.array(file))
        instances = torch.unique(numbers)[1:]  # 0 is none
        with np.load(target_path) as target:
            boxes, labels = torch.from_numpy(target["boxes"]), torch.from_numpy(target["labels"])
        found: dict[str, Any] = self.transform(
            {
                "image": image,
                "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=image.shape[-2:]),
                "labels": labels,
                "masks": tv_tensors.Mask((numbers == instances[:, None, None]).to(torch.uint8)),
            }
        )
        return found | {"masks": found["masks"].view(torch.bool)}


def joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = {name: [sample[name] for sample in samples] for name in samples[0]}
    return batch | {"image": torch.stack(batch["image"])}


def peers(folder: Path) -> dict[str, Iterable[Any]]:
    loader = DataLoader(Objects(folder), BATCH, shuffle=True, drop_last=True, collate_fn=joined, **WORKERS)
    return {"torchvision": loader}


FIELDS = {
    "image": Like(torch.float32, (BATCH, 3, SIDE, SIDE), 0, 1),
    "boxes": Like(torch.float32, (None, 4), 0, SIDE, listed=True),
    "labels": Like(torch.int64, (None,), 1, 90, listed=True),
    "masks": Like(torch.bool, (None, SIDE, SIDE), 0, 1, listed=True),
}
WORK = Work("DETECTION", BATCH, FIELDS, write, peers)
