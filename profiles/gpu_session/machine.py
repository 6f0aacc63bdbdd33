"""What the machine is: its GPU, its bus, its memory, its versions; and the session's photographs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import loaderkit
from loaderkit import native
from loaderkit._internal.system.cgroups import num_cpus
from profiles.gpu_session.context import Context

_PACKAGES = ("numpy", "torchvision", "safetensors", "pydantic", "simplejpeg", "nvidia-dali-cuda130", "nvidia-nccl-cu13")
_QUERIES = (
    *("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.gen.current"),
    *("pcie.link.width.max", "pcie.link.width.current", "compute_cap", "vbios_version"),
)


def facts(context: Context) -> None:
    """What a result depends on."""
    report = context.report
    device = torch.cuda.get_device_name() if context.on_gpu else "cpu"
    report.add(device=device, torch=torch.__version__, cuda=str(torch.version.cuda), python=platform.python_version())
    report.add(loaderkit=loaderkit.__version__, decodes_pieces=native.HAS_JPEG)
    report.add(**{name: version for name in _PACKAGES if (version := _version(name)) is not None})
    report.add(kernel=platform.release(), num_cpus=num_cpus(), cpu=_after_colon("/proc/cpuinfo", "model name"))
    report.add(memory_gib=int(_after_colon("/proc/meminfo", "MemTotal").split()[0]) / 2**20)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    report.add(memlock_soft_bytes=soft, memlock_hard_bytes=hard)
    for path in ("/dev/shm", str(context.work)):
        usage = shutil.disk_usage(path)
        report.add(**{f"free_in_{path.strip('/').split('/')[0]}_gib": usage.free / 2**30})
    if context.on_gpu:
        _gpu(context)
    begin_s = time.perf_counter()
    paths = list(context.photos().rglob("*.jpg"))
    report.add(photographs_made_s=time.perf_counter() - begin_s, num_photographs=len(paths))
    report.add(bytes_a_photograph=sum(path.stat().st_size for path in paths) / len(paths))


def _gpu(context: Context) -> None:
    """As the driver tells it."""
    program = shutil.which("nvidia-smi") or "/usr/local/nvidia/bin/nvidia-smi"
    command = [program, f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        context.report.add(nvidia_smi=f"cannot be run: {error}")
    else:
        values = said.splitlines()[0].split(", ")
        names = [name.replace(".", "_") for name in _QUERIES]
        context.report.add(**dict(zip(names, values, strict=True)))
    nccl: Any = torch.cuda.nccl
    properties = torch.cuda.get_device_properties(0)
    context.report.add(gpu_memory_gib=properties.total_memory / 2**30, num_processors=properties.multi_processor_count)
    context.report.add(num_gpus=torch.cuda.device_count(), nccl=str(nccl.version()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _after_colon(path: str, key: str) -> str:
    if not os.path.exists(path):
        return ""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
