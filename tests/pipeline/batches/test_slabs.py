"""Slabs and leases: reused exactly when no tensor of theirs is left; budgets kept; nothing grows."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from waiting import wait_for

import loaderkit
import profiles.memory
from loaderkit import Pipeline
from loaderkit.errors import ConfigError
from loaderkit.pipeline.batches.slabs import SlabLayout, SlabPool
from loaderkit.samples.chunk import FieldSpec


def make_pool(**fields: tuple[tuple[int, ...], torch.dtype]) -> SlabPool:
    specs = {
        name: FieldSpec("slab", shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in fields.items()
    }
    return SlabPool(SlabLayout.of(specs, 4), num_kept=3)


def take(pool: SlabPool) -> dict[str, torch.Tensor]:
    return {name: slots.tensor for name, slots in pool.take().items()}


INTERRUPTED = """
import _thread, signal, sys, threading
from queue import SimpleQueue
import numpy as np
from loaderkit.pipeline.batches.slabs import Lease

ignored, is_inside = [], False
sys.unraisablehook = ignored.append
returned, memory, end = SimpleQueue(), np.zeros(8, np.uint8), threading.Event()

def handle(number, frame):
    global is_inside
    if is_inside:  # once a round, so that it is caught there
        is_inside = False
        raise KeyboardInterrupt

def interrupt():
    while not end.wait(0.0001):
        _thread.interrupt_main()

signal.signal(signal.SIGINT, handle)
thread = threading.Thread(target=interrupt)
thread.start()
num_made = num_interrupts = 0
for _ in range(300):
    try:
        is_inside = True
        for _ in range(3000):
            np.asarray(Lease(0, returned, memory.__array_interface__))
            num_made += 1
        is_inside = False
    except KeyboardInterrupt:
        num_interrupts += 1
end.set()
thread.join()
print(len(ignored), returned.qsize() >= num_made, num_interrupts > 0)
"""


class TestLeases:
    def test_ctrl_c_is_never_lost_in_one(self) -> None:
        """Python ignores what is raised in a destructor: none of ours may be a place for Ctrl-C to arrive in."""
        ran = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
        assert ran.stdout.split() == ["0", "True", "True"], ran.stderr

    def views(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Everything that can outlive a tensor and still see its memory."""
        x = tensors["x"]
        weight = torch.ones(3, requires_grad=True)
        return {
            "tensor": x,
            "view": x[1:, :2],
            "detached": x.detach(),
            "numpy": x.numpy(),
            "numpy view": x.numpy()[1:],
            "dlpack": torch.utils.dlpack.from_dlpack(x),
            "saved for backward": (x * weight).sum(),
            "storage": x.untyped_storage(),
            "memoryview": x.numpy().data,
        }

    @pytest.mark.parametrize(
        "kind",
        [
            "tensor",
            "view",
            "detached",
            "numpy",
            "numpy view",
            "dlpack",
            "saved for backward",
            "storage",
            "memoryview",
        ],
    )
    def test_a_slab_is_kept_by_anything_that_sees_it(self, kind: str) -> None:
        pool = make_pool(x=((3,), torch.float32), label=((), torch.int64))
        tensors = take(pool)
        held = self.views(tensors)[kind]
        del tensors
        gc.collect()
        assert pool.num_live == 1
        del held
        gc.collect()
        assert pool.num_live == 0

    def test_fields_share_a_slab_but_no_storage(self) -> None:
        pool = make_pool(x=((3,), torch.float32), y=((2, 2), torch.bfloat16), label=((), torch.int64))
        tensors = take(pool)
        assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
            "x": ((4, 3), torch.float32),
            "y": ((4, 2, 2), torch.bfloat16),
            "label": ((4,), torch.int64),
        }
        for name, tensor in tensors.items():
            tensor.fill_({"x": 1.5, "y": 2.5, "label": 7}[name])
        assert {name: sorted(set(t.flatten().tolist())) for name, t in tensors.items()} == {
            "x": [1.5],
            "y": [2.5],
            "label": [7],
        }
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors.values())
        assert all(t.data_ptr() % 64 == 0 for t in tensors.values())
        label = tensors.pop("label")
        del tensors, tensor
        gc.collect()
        assert pool.num_live == 1, "one field alone keeps the slab"
        del label
        assert pool.num_live == 0

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint32, torch.float16, torch.complex64])
    def test_arrays_are_the_tensors_memory(self, dtype: torch.dtype) -> None:
        with torch.device("meta"):  # where tensors are made by default, as a model's are
            pool = make_pool(x=((3, 2), dtype), other=((2,), torch.bfloat16))
            slots = pool.take()
            tensor = slots["x"].tensor
            assert slots["x"].tensor is tensor, "made once"
        assert slots["other"].array is None, "NumPy lacks its type"
        assert slots["other"].memory.size == slots["other"].tensor.nbytes
        array = slots["x"].array
        assert array is not None
        tensor.zero_()
        assert (array.shape, array.dtype) == (tuple(tensor.shape), tensor.numpy().dtype)
        array[...] = 1
        assert tensor.tolist() == np.ones_like(array).tolist()
        assert tensor.dtype == dtype
        del tensor, slots
        gc.collect()
        assert pool.num_live == 1, "the array keeps the slab"
        del array
        assert pool.num_live == 0

    def test_memory_is_used_again(self) -> None:
        pool = make_pool(x=((1000,), torch.float32))
        addresses = set()
        for _ in range(50):
            addresses.add(take(pool)["x"].data_ptr())
        assert len(addresses) == 1
        assert pool.num_allocated == 1

    def test_surplus_is_given_back(self) -> None:
        pool = make_pool(x=((1000,), torch.float32))
        held = [pool.take() for _ in range(20)]
        assert pool.num_allocated == 20
        held.clear()
        gc.collect()
        pool.take()
        assert pool.num_allocated <= 4


def tiny(photos: Path, batch_size: int = 8) -> Pipeline:
    return Pipeline.files(photos, label="parent").shuffle(seed=0).read().decode().resize([24, 24]).batch(batch_size)


class Lists:
    """Samples whose tensors differ in length: they lie in no slab."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.zeros(100_000 + index, dtype=torch.uint8), "text": "t" * 1000}


class TestBudget:
    def test_what_lies_in_no_slab_counts_as_well(self) -> None:
        pipeline = Pipeline.dataset(Lists()).shuffle("none").read().batch(4, ragged={"x": "list"})
        overrides = {"prefetch.memory": "1MiB", "prefetch.batches": 8}
        with loaderkit.build(pipeline, overrides=overrides) as loader:
            for _ in loader:
                assert 0 <= loader.stats().memory["open_bytes"] <= 2**20
        with pytest.raises(ConfigError, match="one batch of 4 takes"):
            next(iter(loaderkit.build(pipeline, overrides={"prefetch.memory": "100KiB"})))

    def test_never_more_open_than_the_budget_holds(self, photos: Path) -> None:
        slab = 8 * 24 * 24 * 3 + 64
        for slabs in (1, 2, 3):
            overrides = {"prefetch.memory": slabs * slab + 10, "prefetch.batches": 16, "prefetch.concurrency": 4}
            with loaderkit.build(tiny(photos).epochs(3), overrides=overrides) as loader:
                for _ in range(3):
                    for _ in loader:
                        memory = loader.stats().memory
                        assert memory["open_bytes"] <= memory["budget_bytes"]
                        assert memory["allocated_bytes"] <= (slabs + 2) * memory["slab_bytes"]

    def test_less_than_one_batch_names_the_minimum(self, photos: Path) -> None:
        loader = loaderkit.build(tiny(photos), overrides={"prefetch.memory": "4KiB"})
        with pytest.raises(ConfigError, match=r"one batch of 8 takes 14 KiB"):
            next(iter(loader))

    def test_keeping_every_batch_works_and_warns_once(self, photos: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING), loaderkit.build(tiny(photos, 1)) as loader:
            batches = list(loader)
            again = list(loader)
        assert len({batch["image"].data_ptr() for batch in batches + again}) == 120
        assert len([record for record in caplog.records if "still referenced" in record.message]) == 1

    def test_delivered_batches_are_never_overwritten(self, photos: Path) -> None:
        with loaderkit.build(tiny(photos), overrides={"prefetch.batches": 2}) as loader:
            kept = [(batch["image"], batch["image"].clone()) for _ in range(4) for batch in loader]
        assert all(torch.equal(image, copy) for image, copy in kept)


def count_resources() -> tuple[int, int]:
    """Threads and descriptors."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def assert_no_more_than(before: tuple[int, int]) -> None:
    """In the end: workers and a monitor may have files open just now."""
    wait_for(lambda: all(now <= then for now, then in zip(count_resources(), before, strict=True)))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestNothingGrows:
    def test_a_hundred_early_breaks_of_one_loader(self, photos: Path) -> None:
        with loaderkit.build(tiny(photos), overrides={"prefetch.concurrency": 2}) as loader:
            for _ in range(20):
                for _ in loader:
                    break
            before, resident = count_resources(), resident_bytes()
            for _ in range(100):
                for _ in loader:
                    break
            assert_no_more_than(before)
            assert resident_bytes() - resident < 16 * 2**20

    def test_a_hundred_loaders_broken_off(self, photos: Path) -> None:
        def once() -> None:
            for _ in loaderkit.build(tiny(photos)):
                break

        for _ in range(10):
            once()
        before, resident = count_resources(), resident_bytes()
        for _ in range(100):
            once()
        assert_no_more_than(before)
        assert resident_bytes() - resident < 16 * 2**20

    @pytest.mark.matrix(1)
    @pytest.mark.parametrize("overrides", [{}, {"stages.read.workers": 2, "stages.decode.workers": 2}])
    def test_large_photographs_in_a_small_budget(self, overrides: dict[str, Any], tmp_path: Path) -> None:
        """12 megapixels are 36 MB decoded. Besides the budget only what is being decoded may be there: one picture in each
        chunk between two pools, not one for every slot of a batch."""
        rng = np.random.default_rng(0)
        pixels = np.repeat(np.repeat(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8), 100, axis=0), 100, axis=1)
        Image.fromarray(pixels).save(tmp_path / "00.jpg", quality=60)
        for number in range(1, 16):
            shutil.copy(tmp_path / "00.jpg", tmp_path / f"{number:02}.jpg")
        pipeline = Pipeline.files(tmp_path, include="*.jpg").read().decode().resize([64, 64]).batch(8)
        (tmp_path / "p.yaml").write_text(pipeline.to_yaml())
        program = (
            "import json, os, sys, torch, loaderkit.loader\n"
            "from loaderkit.engine.autotune import chunk_sizer\n"
            # A fast machine decodes two in the time for a chunk.
            "chunk_sizer.CHUNK_TARGET_S = chunk_sizer._FIRST_TARGET_S = 1e-4\n"
            "def resident():\n"
            "    return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
            "before, most = resident(), 0\n"
            "overrides = {'prefetch.memory': '8MiB', 'prefetch.concurrency': 2, **json.loads(sys.argv[2])}\n"
            "with loaderkit.build(sys.argv[1], overrides=overrides) as loader:\n"
            "    for batch in loader:\n"
            "        most = max(most, resident())\n"
            "print((most - before) / 2**20)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "p.yaml"), json.dumps(overrides)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        num_decoded = 2 if not overrides else 2 + 4 + 1 + 1  # in workers, in the buffer between, in the last pool
        assert float(ran.stdout) < 8 + num_decoded * 36 * 1.25 + 96

    @pytest.mark.prove
    def test_twenty_thousand_samples_stay_within_the_budget(self, photos: Path, tmp_path: Path) -> None:
        """64 MiB of budget, 224 x 224 float batches of 64 (36.75 MiB each): resident memory above the imports stays below
        the budget, the one slab the loop holds, and a constant of 96 MiB (decoded pixels, kernels' own buffers, arenas).
        """
        pipeline = Pipeline.files(photos, label="parent").shuffle(seed=0).read().decode().random_resized_crop(224)
        (tmp_path / "p.yaml").write_text(pipeline.batch(64).normalize().to_yaml())
        program = (
            "import os, sys, torch, loaderkit.loader\n"
            "def resident():\n"
            "    return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
            "torch.ones(8).sum()\n"
            "before, most, count = resident(), 0, 0\n"
            "with loaderkit.build(sys.argv[1], overrides={'prefetch.memory': '64MiB'}) as loader:\n"
            "    while count < 20000:\n"
            "        for batch in loader:\n"
            "            count += len(batch['label']); most = max(most, resident())\n"
            "print((most - before) / 2**20)\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "p.yaml")]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        assert float(ran.stdout) < 64 + 36.75 + 96

    @pytest.mark.prove
    @pytest.mark.parametrize("way", profiles.memory.WAYS)
    @pytest.mark.parametrize("executor", profiles.memory.EXECUTORS)
    def test_a_million_trivial_samples(self, executor: str, way: str) -> None:
        """In long epochs, short ones, and such that are broken off; nothing may be left of any sample, batch or epoch."""
        looks = profiles.memory.run(executor, way, 1_000_000)["bytes"]
        assert max(looks) - looks[0] < 16 * 2**20
