"""Memory into which batches of another rank are received, on their way to a GPU that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from loaderkit.errors import DeviceError
from loaderkit.pipeline.ranks.shared_executor import SharedExecutor

CUDA = torch.device("cuda", 3)


class Runtime:
    """Gives pinned memory while device 3 is the current one, until an error is asked for."""

    def __init__(self) -> None:
        self.current: torch.device | None = None
        self.num_pinned = 0
        self.error: Exception | None = None

    @contextmanager
    def device(self, wanted: torch.device) -> Iterator[None]:
        self.current = wanted
        yield
        self.current = None


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made, empty = Runtime(), torch.empty

    def allocate(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            assert made.current == CUDA, "a context would begin on device 0"
            if made.error is not None:
                raise made.error
            made.num_pinned += 1
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    return made


def executor(pinned_for: torch.device | None) -> SharedExecutor:
    nothing: Any = None
    return SharedExecutor(
        None,
        nothing,
        nothing,
        schedule=nothing,
        num_epochs=None,
        about=dict,
        memory_bytes=0,
        timeout_s=1.0,
        raises=False,
        pinned_for=pinned_for,
    )


def test_what_is_large_is_pinned_for_the_device_it_is_copied_to(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    for pinned_for, num_pinned in ((None, 0), (CUDA, 1)):
        made = executor(pinned_for)
        memory = [made._new_memory(size) for size in (2**10, 2**20)]
        assert [(one.dtype, one.shape) for one in memory] == [(torch.uint8, (2**10,)), (torch.uint8, (2**20,))]
        assert runtime.num_pinned == num_pinned
    runtime.error = RuntimeError("CUDA error: out of memory")
    assert [len(made._new_memory(2**20)) for _ in range(2)] == [2**20] * 2
    assert caplog.text.count("cannot be pinned (CUDA error: out of memory)") == 1


def test_the_error_of_an_earlier_kernel_is_not_that_of_pinning(runtime: Runtime) -> None:
    runtime.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceError, match="illegal memory access"):
        executor(CUDA)._new_memory(2**20)
