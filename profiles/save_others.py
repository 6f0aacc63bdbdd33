"""What `profiles.save` compares with: other savers, a training loop beside a flush, and saves to a bucket."""

from __future__ import annotations

import importlib
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from loaderkit.checkpoint import StreamWriter
from profiles.stores.servers import ACCESS_KEY, SECRET_KEY, Seaweed, free_port

State = dict[str, torch.Tensor]
Runs = Mapping[str, Callable[[], float]]
_PART = 8 << 20


def in_turns(runs: Runs, rounds: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """What each gave in each round but the first ones, the order changed from round to round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + warm_up):
        order = list(runs)
        random.Random(number).shuffle(order)
        for name in order:
            value = runs[name]()
            if number >= warm_up:
                found[name].append(value)
    return found


# --------------------------------------------------------------------------------------------------------- savers


def other_savers() -> dict[str, Callable[[State, Path], Any]]:
    """Savers by name: each returns once the state is written, and, but for torch_checkpointing, durable."""
    savers: dict[str, Callable[[State, Path], Any]] = {
        "torch.save": _by_torch,
        "safetensors": _by_safetensors,
        "dcp.async_save, thread": lambda state, path: _result(async_save(state, checkpoint_id=path, no_dist=True)),
        "dcp.async_save, process": lambda state, path: _result(process_save(state, path)),
    }
    try:
        others: Any = importlib.import_module("torch_checkpointing")
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
    except ImportError as error:
        print(f"without torch_checkpointing ({error})")
        return savers
    manager = others.CheckpointManager.Config(
        save=others.SyncCheckpointSaverConfig(),
        storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    return savers | {
        "torch_checkpointing, not durable": lambda state, path: manager.save(os.fspath(path), {"model": state})
    }


def process_save(state: State, path: Path) -> Any:
    """`dcp.async_save` by a process, which needs a process group; a future."""
    if not dist.is_initialized():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    return async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)


def _result(future: Any) -> Any:
    return future.result()


def _by_torch(state: State, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _by_safetensors(state: State, path: Path) -> None:
    safetensors.torch.save_file(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------- loop


class Loop:
    """A training whose steps are small: many calls of Python and torch, as where a GPU computes. One thread."""

    def __init__(self) -> None:
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._data = torch.randn(32, 256)

    def step(self) -> None:
        """About 3 ms."""
        self._optimizer.zero_grad()
        self._model(self._data).square().mean().backward()
        self._optimizer.step()

    def steps_a_second(self, begin: Callable[[], Callable[[], bool]]) -> float:
        """While what `begin` begins is not done."""
        is_done, num, begin_s = begin(), 0, time.perf_counter()
        while not is_done():
            self.step()
            num += 1
        return num / (time.perf_counter() - begin_s)


def in_a_thread(work: Callable[[], Any]) -> Callable[[], bool]:
    """Begin it; True once it is done."""
    thread = threading.Thread(target=work)
    thread.start()
    return lambda: not thread.is_alive()


def for_seconds(seconds: float) -> Callable[[], bool]:
    """True after that time."""
    end_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end_s


# ------------------------------------------------------------------------------------------------------------- s3


def measure_s3(state: State, folder: Path, rounds: int, workers: int) -> dict[str, list[float]]:
    """Seconds of every contestant, to a server on this machine."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3FileSystem, S3StorageWriter

    os.environ |= {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server = Seaweed(folder / "server")
    os.environ["AWS_ENDPOINT_URL_S3"] = server.endpoint
    try:
        boto = server.boto()
        boto.create_bucket(Bucket="data")
        settings = S3ClientConfig(force_path_style=True)
        client: Any = S3Client("us-east-1", endpoint=server.endpoint, s3client_config=settings)
        data = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in state.values()]).numpy().data
        ours = StreamWriter("s3://data/a", workers=workers)
        copied = ours.stage(state)

        def by_connector(num_threads: int) -> Any:
            writer: Any = S3StorageWriter("us-east-1", "s3://data/a", settings, thread_count=num_threads)
            writer.fs = S3FileSystem("us-east-1", s3_client=client)
            return save(state, storage_writer=writer, no_dist=True)

        def bare() -> None:
            upload = boto.create_multipart_upload(Bucket="data", Key="a/x")["UploadId"]

            def part(number: int) -> dict[str, Any]:
                body = bytes(data[number * _PART : (number + 1) * _PART])
                answer = boto.upload_part(Bucket="data", Key="a/x", UploadId=upload, PartNumber=number + 1, Body=body)
                return {"PartNumber": number + 1, "ETag": answer["ETag"]}

            with ThreadPoolExecutor(workers) as pool:
                parts = list(pool.map(part, range(-(-len(data) // _PART))))
            boto.complete_multipart_upload(Bucket="data", Key="a/x", UploadId=upload, MultipartUpload={"Parts": parts})

        def timed(run: Callable[[], Any]) -> Callable[[], float]:
            def measured() -> float:
                begin_s = time.perf_counter()
                run()
                took_s = time.perf_counter() - begin_s
                found = boto.list_objects_v2(Bucket="data").get("Contents", [])
                assert sum(item["Size"] for item in found) >= len(data)
                for item in found:
                    boto.delete_object(Bucket="data", Key=item["Key"])
                return took_s

            return measured

        runs = {
            "loaderkit": timed(lambda: save(copied, checkpoint_id="s3://data/a", storage_writer=ours, no_dist=True)),
            "s3torchconnector": timed(lambda: by_connector(1)),
            f"s3torchconnector, {workers} threads": timed(lambda: by_connector(workers)),
            "boto3, parts in parallel": timed(bare),
        }
        return in_turns(runs, rounds)
    finally:
        server.stop()
