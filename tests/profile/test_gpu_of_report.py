"""Which GPU a report names, on machines that are made up; for a program that uses none CUDA is not begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import loaderkit
from loaderkit.profile import build
from loaderkit.profile.experiments.headroom import consumer_rate
from loaderkit.profile.report_parts import Machine


def begins_cuda(*_: Any) -> NoReturn:
    raise AssertionError("it begins CUDA, or loads its driver")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight, which no program may ask for them."""
    for name in ("is_available", "device_count", "current_device", "get_device_name", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, begins_cuda)


@pytest.mark.usefixtures("gpus")
def test_a_program_that_uses_no_gpu() -> None:
    with loaderkit.build(loaderkit.Pipeline.dataset(list(range(8))).read().batch(2)) as loader:
        with loader.profile() as profile:
            batches = list(loader)
        assert profile.result.machine.device == "cpu"
        assert consumer_rate(lambda batch: None, batches, 0.0).num_batches >= 2


def properties(device: Any) -> Any:
    number = device if isinstance(device, int) else device.index
    return SimpleNamespace(name=f"GPU {number}", pci_domain_id=0, pci_bus_id=0x80 + number, pci_device_id=0)


@pytest.mark.parametrize(("device", "number"), [(None, 1), (torch.device("cuda", 3), 3)])
def test_the_one_to_which_batches_go_or_that_the_loop_uses(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | None, number: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found: Machine = build.machine(device)
    assert found.device == f"GPU {number}"
    assert build._gpu_address(device) == f"0000:8{number}:00.0"
