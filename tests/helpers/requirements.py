"""What `make integration` needs: nothing of it is skipped for lack of a package or a program."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

PACKAGES = (
    "accelerate",
    "datasets",
    "ipykernel",
    "kubernetes_validate",
    "lightning",
    "material",  # of mkdocs-material
    "nbclient",
    "ray",
    "tensorboard",
    "transformers",
    "websocket",
)
# Debian's package of each program.
PROGRAMS = {"chromium": "chromium", "prometheus": "prometheus", "promtool": "prometheus"}


def require_all() -> None:
    """End the run if something is missing, with what to install."""
    packages = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    programs = sorted({package for name, package in PROGRAMS.items() if shutil.which(name) is None})
    if packages:
        pytest.exit(f"these packages are not installed: {', '.join(packages)}. Run `make integration`", 1)
    if programs:
        pytest.exit(f"these programs are not installed: run `apt-get install {' '.join(programs)}` as root", 1)
