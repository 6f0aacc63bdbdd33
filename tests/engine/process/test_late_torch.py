"""A process that loads without torch: where it needs none, its batches are those of threads, and where it does, it has it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leftovers import nothing_left  # noqa: F401 - a fixture for every test here
from numbers_dataset import PROCESS, TWO_PROCESSES, numbers, pids_of
from PIL import Image

import loaderkit
from loaderkit import Pipeline
from loaderkit.connectors.memory import MemoryConnector
from loaderkit.engine.process.worker_process import WorkerSpec
from loaderkit.pipeline.compiler import Compiler
from loaderkit.stages.kernels import can_resample

pytestmark = pytest.mark.matrix(2)

NUM = 21  # so that the last batch of 8 is short


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pictures as files and in a tar shard, two of them damaged, with arrays beside, and records."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    (root / "shards").mkdir()
    with tarfile.open(root / "shards" / "0.tar", "w") as shard:
        for number in range(NUM):
            folder = root / "photos" / f"class{number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            file = io.BytesIO()
            pixels = rng.integers(0, 256, (4, 5, 3), np.uint8).repeat(12, 0).repeat(12, 1)
            Image.fromarray(pixels).save(file, "JPEG" if number % 4 else "PNG")
            extension = "jpg" if number % 4 else "png"
            content = file.getvalue() if number not in (3, 12) else file.getvalue()[:200]
            (folder / f"{number:02}.{extension}").write_bytes(content)
            np.save(folder / f"{number:02}.npy", rng.standard_normal((2, 3)).astype(np.float16))
            for name, value in ((extension, content), ("cls", b"%d" % number), ("txt", b"text %d" % number)):
                member = tarfile.TarInfo(f"{number:02}.{name}")
                member.size = len(value)
                shard.addfile(member, io.BytesIO(value))
    np.save(root / "records.npy", rng.standard_normal((NUM, 3)).astype(np.float32))
    (root / "halves.bin").write_bytes(rng.integers(0, 2**16, NUM * 4, np.uint16).tobytes())
    return root


def files(data: Path) -> Pipeline:
    return Pipeline.files(str(data / "photos"), include="**/*.{jpg,png}", label="parent").read().decode()


def shards(data: Path) -> Pipeline:
    return Pipeline.tar(str(data / "shards")).read().decode()


WITHOUT: dict[str, Callable[[Path], Pipeline]] = {
    "pictures": lambda data: (
        files(data).random_resized_crop(24).random_horizontal_flip().batch(8).normalize().transfer()
    ),
    "pictures as they are": lambda data: files(data).random_crop(30).resize([20, 24]).batch(8),
    "shards": lambda data: shards(data).center_crop(50).batch(8),
    "bytes of shards": lambda data: Pipeline.tar(str(data / "shards")).read().batch(8),
    "arrays": lambda data: Pipeline.files(str(data / "photos"), include="**/*.npy").read().decode().batch(8),
    "records": lambda data: Pipeline.array(str(data / "records.npy")).read().batch(8),
}

WITH: dict[str, Callable[[Path], Pipeline]] = {
    "a data set": lambda data: numbers(NUM),
    "jitter": lambda data: files(data).color_jitter(brightness=0.5, hue=0.1).resize([20, 24]).batch(8).normalize(),
    "a filter that torch has": lambda data: files(data).resize([20, 24], interpolation="bicubic").batch(8),
    "a function of samples": lambda data: files(data).resize([20, 24]).call(brighten).batch(8),
    "a function of batches": lambda data: shards(data).resize([20, 24]).batch(8).call(add_sum),
    "records before a function": lambda data: Pipeline.array(str(data / "records.npy")).read().call(same).batch(8),
    "half precision": lambda data: files(data).resize([20, 24]).batch(8).normalize(dtype="bfloat16"),
    "another layout": lambda data: files(data).resize([20, 24]).batch(8).transfer(device="cpu", channels_last=True),
    "records of a type that NumPy lacks": lambda data: (
        Pipeline.array(str(data / "halves.bin"), dtype="bfloat16", shape=[4]).read().batch(8)
    ),
    "padding": lambda data: files(data).batch(8, ragged={"image": "pad"}),
}


def brighten(sample: dict[str, Any]) -> None:
    sample["image"] = sample["image"].add(1)


def add_sum(batch: dict[str, Any]) -> None:
    batch["sum"] = batch["image"].float().sum()


def same(sample: dict[str, Any]) -> None:
    pass


def contents(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as what can be compared, and be kept when its memory is used again."""
    return {
        name: (value.dtype, value.shape, value.stride(), value.flatten().view(torch.uint8).numpy().tobytes())
        if isinstance(value, torch.Tensor)
        else list(value)
        for name, value in batch.items()
    }


def batches(pipeline: Pipeline, policy: str = "skip", **overrides: Any) -> tuple[list[dict[str, Any]], list[bool]]:
    """Two epochs of a rank that reads samples again, and which of the processes that load have torch in the end."""
    settings: dict[str, Any] = {"errors.on_bad_sample": policy, "order.seed": 3, **overrides}
    with loaderkit.build(pipeline, overrides=settings, rank=1, world_size=2) as loader:
        found = []
        for batch in [batch for _ in range(2) for batch in loader]:
            found.append(contents(batch))
            change_in_place(batch)
        is_elsewhere = settings.get("prefetch.executor") == "process"
        return found, [has_torch(pid) for pid in pids_of(loader)] if is_elsewhere else []


def change_in_place(batch: dict[str, Any]) -> None:
    """What a loop may do with its own tensors: none is a view, in which autograd would allow less."""
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.add_(torch.ones((), dtype=value.dtype, requires_grad=True))
            value.detach_()


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether processes were told to import torch first."""
    found: list[bool] = []

    def job(*args: Any, **kwargs: Any) -> WorkerSpec:
        found.append("torch" in kwargs["preload"])
        return WorkerSpec(*args, **kwargs)

    monkeypatch.setattr("loaderkit.pipeline.process_setup.WorkerSpec", job)
    return found


@pytest.mark.skipif(not can_resample(), reason="without the C module, or AVX2, torch resizes")
@pytest.mark.parametrize("executor", [PROCESS, TWO_PROCESSES], ids=["one", "two"])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("kind", WITHOUT)
def test_what_needs_no_torch_is_the_same_without_it(
    kind: str, policy: str, executor: dict[str, Any], data: Path
) -> None:
    pipeline = WITHOUT[kind](data)
    expected, _ = batches(pipeline, policy)
    found, have_torch = batches(pipeline, policy, **executor)
    assert found == expected
    assert len(found) == 4
    assert not any(have_torch)


@pytest.mark.parametrize("kind", WITH)
def test_what_needs_torch_has_it_from_the_beginning(kind: str, data: Path, preloaded: list[bool]) -> None:
    pipeline = WITH[kind](data)
    expected, _ = batches(pipeline)
    found, have_torch = batches(pipeline, "skip", **PROCESS)
    assert found == expected
    assert all(have_torch)
    assert preloaded == [True]


class TheirConnector(MemoryConnector):
    """Somebody's own, whose module imports torch, as this one does."""


def test_user_code_never_runs_where_torch_is_put_off(data: Path, preloaded: list[bool]) -> None:
    """Torch that two threads import by halves is broken for good."""
    objects = {path.name: path.read_bytes() for path in sorted((data / "photos").rglob("*.npy"))}
    for make, is_theirs in ((MemoryConnector, False), (TheirConnector, True)):
        pipeline = Pipeline.files("memory://", include="**/*.npy").read().decode().batch(8)
        with loaderkit.build(pipeline, connectors={"memory": make(objects)}, overrides=PROCESS) as loader:
            assert [len(batch["__key__"]) for batch in loader] == [8, 8, 5]
            assert [has_torch(pid) for pid in pids_of(loader)] == [is_theirs]
    assert preloaded == [False, True]


@pytest.mark.parametrize("kind", WITH)
def test_what_needs_torch_unexpectedly_imports_it(kind: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the threads that come upon it, all at once."""
    pipeline = WITH[kind](data)
    expected, _ = batches(pipeline)
    monkeypatch.setattr(Compiler, "needs_torch", False)
    found, have_torch = batches(pipeline, "skip", **PROCESS)
    assert found == expected
    assert all(have_torch)


def test_threads_that_come_upon_torch_compute_alone() -> None:
    code = (
        "import threading\n"
        "from loaderkit._internal.lazily import put_torch_off\n"
        "from loaderkit.engine.process.worker_main import _import_torch\n"
        "put_torch_off(_import_torch)\n"
        "from loaderkit._internal.lazily import torch\n"
        "def note(): torch.zeros(1); print(end=f'{torch.get_num_threads()} ')\n"
        "threads = [threading.Thread(target=note) for _ in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "3"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert ran.stdout.split() == ["1"] * 4


def test_the_engine_is_imported_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        "from loaderkit._internal.lazily import has_torch, is_tensor, put_torch_off\n"
        "put_torch_off(lambda: importlib.import_module('torch'))\n"
        "import loaderkit.pipeline.engine_factory, loaderkit.engine.process.batch_server\n"
        "from loaderkit._internal.lazily import torch\n"
        "print(has_torch(), is_tensor(1), 'torch' in sys.modules, hasattr(torch, '__wrapped__'), 'torch' in sys.modules)\n"
        "found = torch.zeros(2)\n"
        "print(has_torch(), is_tensor(found), torch.__version__ == sys.modules['torch'].__version__)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.splitlines() == ["False False False False False", "True True True"]


def test_a_training_program_has_torch_itself() -> None:
    """No proxy stands between it and its tensors, whatever it imports first."""
    for first in ("loaderkit.build", "loaderkit.Pipeline", "loaderkit.restore", "__import__('torch')"):
        code = f"import loaderkit; {first}; import torch; from loaderkit._internal import lazily; print(lazily.torch is torch)"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        assert ran.stdout.strip() == "True"
