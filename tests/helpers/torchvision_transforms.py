"""torchvision's v2 transforms, as users put them in a `call` and in a data set.

PyPI's torchvision is built for CUDA. Beside a torch for the CPU its C++ operators do not load, and its import fails as two of
them are not declared; the transforms use none. Libraries that look for torchvision would fail with it, so `make integration`
puts it into a folder that nothing else has on its path.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset

_LIBRARY: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    with suppress(RuntimeError):  # it is declared: all of them have loaded
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.path.append(str(Path(sys.prefix) / "torchvision"))
try:
    v2: Any = importlib.import_module("torchvision.transforms.v2")
    tv_tensors: Any = importlib.import_module("torchvision.tv_tensors")
    data_sets: Any = importlib.import_module("torchvision.datasets")
finally:
    sys.path.pop()

augment = v2.Compose(
    [
        v2.RandomResizedCrop(24, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.RandomRotation(30)]),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v2.GaussianBlur(3),
        v2.RandomErasing(0.5, value="random"),
    ]
)
normalize = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)])
mix = v2.CutMix(num_classes=3)


def augment_with_mask(sample: dict[str, Any]) -> Any:
    """The mask is cut, flipped and turned with the image, and neither coloured nor blurred."""
    image, mask = tv_tensors.Image(sample["image"]), tv_tensors.Mask(sample["mask"])
    return v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip()])({"image": image, "mask": mask})


class Photos(Dataset[Any]):
    """A data set as in torchvision's tutorials: Pillow's image goes in, a float tensor comes out."""

    def __init__(self, folder: str, kind: str = "tensor") -> None:
        self._files = sorted(Path(folder).glob("*/*.jpg"))
        last = {"tensor": [v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()], "image": [], "pillow": []}[kind]
        first = [] if kind == "pillow" else [v2.ToImage()]
        self._transform = v2.Compose([v2.Resize((32, 32)), *first, *last])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self._files[index]) as image:
            return self._transform(image.convert("RGB")), index
