"""A real S3 server for tests: SeaweedFS in one process on loopback, with keys enforced. About 3 s to start."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret"
_PATIENCE_S = 60.0
# Become the program given, which the kernel kills when the thread that started it is gone (PR_SET_PDEATHSIG), however it
# went: a worker of pytest that crashes leaves no server behind.
_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


def find_weed() -> str | None:
    """The program, beside the interpreter or on the path; None if it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_port() -> int:
    """A port that nothing listens on, and neither on it + 10000, where SeaweedFS puts its gRPC; this process's until it ends.

    Other processes of tests that ask get others, also before the server listens: the kernel lets one process at a time have a
    name. Both ports are below those that the kernel gives to whoever connects.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 22000)
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0loaderkit-tests-port-{port}")
            for number in (port, port + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            name.close()
            continue
        _RESERVED.append(name)
        return port


_RESERVED: list[socket.socket] = []  # they hold the names


class Seaweed:
    """A running server; `stop` ends exactly the process it started."""

    def __init__(self, folder: Path) -> None:
        program = find_weed()
        assert program is not None
        folder.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.port = free_port()
        master, volume, filer = free_port(), free_port(), free_port()
        self._log = open(folder / "log.txt", "wb")  # noqa: SIM115 - as long as the server runs
        # Sockets have short names only.
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", _DIE_WITH_PARENT,
                program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
                f"-master.port={master}", f"-volume.port={volume}", "-filer", f"-filer.port={filer}",
                "-filer.localSocket=f.sock", "-s3", f"-s3.port={self.port}", "-s3.localSocket=s3.sock",
                "-s3.config=s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=1000",
                "-master.volumeSizeLimitMB=1024", "-volume.preStopSeconds=0",
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "GOMEMLIMIT": "400MiB", "GOGC": "50"},
        )  # fmt: skip
        self.endpoint = f"http://127.0.0.1:{self.port}"
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        """Return once a bucket can be written to: the parts of the server find one another one after the other."""
        client = self.boto()
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="x", Body=b"x")
                return
            except Exception as error:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"SeaweedFS did not start: {error}; see {self._log.name}") from error
                time.sleep(0.1)

    def boto(self) -> Any:
        """A boto3 client: what is written with it in one part has its MD5 digest as etag."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"}),
        )

    def make_bucket(self, name: str) -> None:
        """Make a bucket, unless it is there."""
        client = self.boto()
        if name not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=name)

    def stop(self) -> None:
        """Kill the server (it takes 15 s to go politely) and wait for its end."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()
