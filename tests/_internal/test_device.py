"""Which GPU `auto` is, on machines that are made up; and errors of kernels, told from others."""

from __future__ import annotations

import pytest
import torch

from loaderkit._internal.cuda.device import raise_kernel_failure, resolve_device
from loaderkit.errors import DeviceError

NOTE = "\nCUDA kernel errors might be asynchronously reported at some other API call"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def with_gpus(monkeypatch: pytest.MonkeyPatch, num: int, current: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


@pytest.mark.parametrize(
    ("num", "current", "rank", "number", "says"),
    [
        (8, 0, "3", 3, True),  # under torchrun, without `set_device`
        (8, 0, "0", 0, False),
        (8, 0, "", 0, False),
        (8, 3, "3", 3, False),
        (8, 2, "5", 2, False),  # set by the program, to whatever it wants
        (1, 0, "3", 0, False),  # each process sees its own GPU
        (2, 0, "3", 0, False),  # several processes share one
    ],
)
def test_auto_is_the_gpu_of_this_rank(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num: int,
    current: int,
    rank: str,
    number: int,
    says: bool,
) -> None:
    with_gpus(monkeypatch, num, current)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert resolve_device("auto") == torch.device("cuda", number)
    assert ("set_device(3)" in caplog.text) == says
    assert resolve_device("cuda") == torch.device("cuda", current), "what torch means by it"
    assert resolve_device("cuda:0") == torch.device("cuda", 0)


def test_a_rank_without_a_gpu_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0, 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "Triton Error [CUDA]: misaligned address",
    ],
)
def test_an_error_that_a_kernel_leaves_behind(message: str) -> None:
    error = torch.AcceleratorError(message + NOTE)
    with pytest.raises(DeviceError, match=r"^a kernel .* transfer, with batch 7, was the next") as caught:
        raise_kernel_failure(error, "transfer, with batch 7,")
    assert caught.value.__cause__ is error
    assert message in str(caught.value)
    assert NOTE not in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        torch.AcceleratorError("CUDA error: invalid argument" + NOTE),
        RuntimeError("misaligned address"),
        ValueError("CUDA error: device-side assert triggered"),
    ],
)
def test_errors_of_the_call_itself(error: Exception) -> None:
    raise_kernel_failure(error, "transfer")
