"""mypy, as a user's program meets it: right uses of `Pipeline` pass, and each wrong one is an error in its line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import loaderkit

pytestmark = pytest.mark.integration

PROGRAM = """
from pathlib import Path
from typing import Any

import loaderkit
from loaderkit import Pipeline


def darken(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": sample["image"] // 2}


photos = (
    Pipeline.files(Path("data"), include=["**/*.jpg"], label="parent", limit=100, cache={"dir": "c", "size": "1GiB"})
    .shuffle(False)
    .read()
    .decode(masks=["mask"], workers=2)
    .random_resized_crop([224, 224], scale=(0.5, 1.0))
    .resize(224, "bicubic", antialias=False)
    .color_jitter(0.4, hue=[-0.1, 0.1])
    .call(darken, timeout="5s", name="darken")
    .batch(32, drop_last=True, ragged={"boxes": "pad"})
    .transfer("cuda:0")
    .normalize(mean=[0.5], std="imagenet")
    .prefetch(memory="1GiB", batches="auto", executor="process", timeout=30)
    .errors(on_bad_sample="skip", quarantine=Path("bad.jsonl"))
    .output(["image", "label"])
)
tokens = Pipeline.array("tokens.bin", dtype="uint16", shape=[], window=2049).shuffle("block", block="8MiB").read().batch(8)
items: Pipeline = Pipeline.dataset([1, 2], fields=["x"]).read().batch(2)
tensors = Pipeline.checkpoint("step-1", keys="model.*", verify=True).read()
with loaderkit.build(photos, rank=0, world_size=2) as loader:
    for batch in loader:
        loader.state_dict()

Pipeline.files("data", lable="parent")  # wrong: lable
Pipeline.files("data", label="folder")  # wrong: label
Pipeline.files()  # wrong: files
photos.resise(224)  # wrong: resise
photos.resize()  # wrong: size
photos.resize("big")  # wrong: resize
photos.resize((1, 2, 3))  # wrong: resize
photos.batch(32, True, drop_lst=True)  # wrong: drop_lst
photos.normalize(mean="imagnet")  # wrong: mean
photos.decode(masks="mask")  # wrong: masks
photos.prefetch(executer="process")  # wrong: executer
photos.shuffle("blok")  # wrong: shuffle
loaderkit.build(photos, world=2)  # wrong: world
"""

SETTINGS = """
[mypy]
strict = True
# For this test's speed alone: nothing here depends on their types, and reading them takes 20 seconds.
[mypy-torch.*,numpy.*,pydantic.*,scipy.*]
follow_imports = skip
# As of an installed package. Its own types are checked by `make lint`.
[mypy-loaderkit.*]
ignore_errors = True
"""


def test_mypy_knows_every_stage_and_source(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "program.py"]
    where = {
        **os.environ,
        "MYPYPATH": str(Path(loaderkit.__file__).parents[1]),
    }  # mypy knows nothing of editable installs
    ran = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True)
    errors = [line for line in ran.stdout.splitlines() if ": error: " in line]
    wrong = {n: line.split("# wrong: ")[1] for n, line in enumerate(PROGRAM.splitlines(), 1) if "# wrong: " in line}
    assert {int(line.split(":")[1]) for line in errors} == wrong.keys(), ran.stdout + ran.stderr
    for number, word in wrong.items():
        assert any(line.startswith(f"program.py:{number}: ") and word in line for line in errors), ran.stdout
