"""The bound on memory holds for the process as a whole, not only in the counters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_states import save_dcp
from file_systems import is_out_of_the_page_cache

pytestmark = pytest.mark.matrix(1)

# `ru_maxrss` of a process that was just started is that of the one that started it, where that was larger; VmHWM is its own.
PROGRAM = """
import re, sys
import torch, loaderkit
import loaderkit.checkpoint.restore.api
def peak():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]) * 1024
shape, dtype = eval(sys.argv[2])
into = {f"t{n}": torch.ones(shape, dtype=dtype) for n in range(8)}
into = {name: (tensor.t() if sys.argv[3] == "strided" else tensor) for name, tensor in into.items()}
before = peak()
loaderkit.restore(sys.argv[1], into, memory="32MiB", dtype="target")
print(peak() - before)
"""
CONSTANT = 24 * 2**20  # threads' stacks, torch's kernels used for the first time


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["same", "strided", "cast"])
@pytest.mark.parametrize("kept", ["torch", "dcp"])
def test_four_times_the_bound(tmp_path: Path, kind: str, kept: str) -> None:
    state = {f"t{n}": torch.full((2048, 2048), float(n)) for n in range(8)}  # 128 MiB
    if kept == "torch":
        torch.save(state, tmp_path / "x")
    else:
        save_dcp(state, tmp_path / "x")
    dtype = "torch.bfloat16" if kind == "cast" else "torch.float32"
    arguments = [str(tmp_path / "x"), f"((2048, 2048), {dtype})", kind]
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) <= 32 * 2**20 + CONSTANT


@pytest.mark.prove
@pytest.mark.parametrize("around", [False, True])
def test_what_24_workers_need_for_themselves(tmp_path: Path, around: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read straight into tensors that are there, so nothing is staged; past the page cache, through 2 MiB each."""
    for launcher in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(launcher, raising=False)
    torch.save({f"t{n}": torch.full((4096, 2048), float(n)) for n in range(8)}, tmp_path / "x")
    if around and not is_out_of_the_page_cache(str(tmp_path / "x")):
        pytest.skip("the files of this filesystem are nowhere but in memory")
    program = PROGRAM.replace('memory="32MiB"', 'memory="1GiB", concurrency=24')
    arguments = [str(tmp_path / "x"), "((4096, 2048), torch.float32)", "same"]
    ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) <= CONSTANT + (24 * 2 * 2**20 if around else 0)


@pytest.mark.prove
def test_few_small_tensors_of_many_with_checksums(tmp_path: Path) -> None:
    """Each lies in blocks of its own, all of which are read for its checksum, and never all together."""
    import safetensors.torch

    from loaderkit.checkpoint import write_manifest

    state = {f"t{n:04}": torch.full((75_000,), float(n)) for n in range(400)}
    safetensors.torch.save_file(state, tmp_path / "x")
    write_manifest(tmp_path / "x")
    program = PROGRAM.split("shape, dtype", maxsplit=1)[0] + SMALL
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) <= 32 * 2**20 + CONSTANT


SMALL = """
keys = [f"t{n:04}" for n in range(0, 400, 20)]
loaderkit.restore(sys.argv[1], keys=keys[:1], memory="32MiB")
before = peak()
restored = loaderkit.restore(sys.argv[1], keys=keys, memory="32MiB", verify=True)
kept = sum(tensor.nbytes for tensor in restored.values())
print(peak() - before - kept)
"""
