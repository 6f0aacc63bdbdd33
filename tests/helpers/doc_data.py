"""Data that pages of documentation take for a user's own."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed_folders import write_zero
from PIL import Image


def write_coco(folder: Path) -> None:
    """COCO's layout, with the same photographs for training and validation."""
    parts = [folder / "train2017", folder / "val2017"]
    for part in (*parts, folder / "annotations"):
        part.mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(24):
        name = f"{number:012}.jpg"
        for part in parts:
            height = 90 + number if part.name == "val2017" else 90
            Image.fromarray(np.full((height, 120, 3), 10 * number, np.uint8)).save(part / name)
        images.append({"id": number, "file_name": name})
        annotations += [
            {"image_id": number, "category_id": 9, "bbox": [left, 10, 25, 40], "iscrowd": 0}
            for left in range(0, 30 * (number % 4), 30)
        ]
    categories = [{"id": 7, "name": "cat"}, {"id": 9, "name": "dog"}]
    found = {"categories": categories, "images": images, "annotations": annotations}
    for part in parts:
        (folder / "annotations" / f"instances_{part.name}.json").write_text(json.dumps(found))


def write_sensors(path: Path) -> None:
    """A table in a SQLite file."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE sensors (value REAL, label INTEGER)")
        connection.executemany("INSERT INTO sensors VALUES (?, ?)", [(number / 8, number % 3) for number in range(64)])
        connection.commit()


def write_pairs(path: Path) -> None:
    """Preference pairs, a JSON object a line."""
    lines = []
    for number in range(32):
        answers = {
            name: [{"role": "assistant", "content": text}]
            for name, text in (("chosen", "fine thanks"), ("rejected", "why"))
        }
        prompt = [{"role": "user", "content": "why " * (1 + number % 5)}]
        lines.append(json.dumps({"prompt": prompt, **answers}) + "\n")
    path.write_text("".join(lines))


def write_zero_run(folder: Path) -> None:
    """What DeepSpeed saves of the small model on its page, trained by two ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    states = {kind: {name: torch.rand_like(weights[name]) for name in weights} for kind in ("exp_avg", "exp_avg_sq")}
    write_zero(folder / "global_step500", 2, 2, [weights], states, frozen={}, buffers={}, tied={})
    (folder / "latest").write_text("global_step500")
