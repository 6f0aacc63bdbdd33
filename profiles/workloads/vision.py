"""torchvision's transforms, as the tests load them: from the folder into which `make integration` puts torchvision."""

from __future__ import annotations

import sys
from pathlib import Path

import transformers  # noqa: F401 - it must look for torchvision before that is there

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from torchvision_transforms import tv_tensors, v2

__all__ = ["tv_tensors", "v2"]
