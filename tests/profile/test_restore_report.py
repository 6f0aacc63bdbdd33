"""`loaderkit profile` of a checkpoint pipeline: what it says, and that its figures fit together."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from buckets import upload
from checkpoint_states import pack
from file_systems import is_out_of_the_page_cache
from seaweed import Seaweed

import loaderkit
from loaderkit.checkpoint import write_manifest
from loaderkit.cli import main
from loaderkit.connectors.file import FileConnector
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.builder import Pipeline
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import RestoreReport
from loaderkit.profile.restore_report import profile_restore

PIPELINE = Path(__file__).parents[2] / "pipelines" / "restore.yaml"
CPU = "stages.transfer.device=cpu"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards, one with large tensors and one with small ones, and their checksums."""
    place = tmp_path / "checkpoint"
    place.mkdir()
    shards = {"large.safetensors": {"big": torch.randn(3_000_000), "other": torch.randn(700_000)}}
    shards["small.safetensors"] = {f"layer.{n}": torch.randn(300, n + 1) for n in range(20)}
    for name, tensors in shards.items():
        safetensors.torch.save_file(tensors, place / name)
    write_manifest(place)
    monkeypatch.setenv("CHECKPOINT", str(place))
    monkeypatch.chdir(tmp_path)
    return place


def fits_together(report: RestoreReport) -> None:
    assert report.num_tensors == 22
    assert report.fetched_bytes >= report.num_bytes > 0
    assert sum(row.num_bytes for row in report.objects) == report.fetched_bytes
    assert sum(row.num_reads for row in report.objects) == report.num_reads
    assert sum(report.waited.values()) <= report.wall_s
    assert report.bytes_per_s == pytest.approx(report.num_bytes / report.wall_s)
    assert report.bare_bytes_per_s is not None
    assert report.percent_of_bare == pytest.approx(100 * report.bytes_per_s / report.bare_bytes_per_s)
    busy = {row.name: row.busy_s for row in report.stages}
    assert sum(row.read_s + row.verify_s for row in report.objects) <= busy["read"] + 1e-3
    assert sum(row.copy_s + row.cast_s for row in report.objects) <= busy["place"] + 1e-3


@pytest.mark.parametrize("dtype", ["null", "bfloat16"])
def test_figures_fit_together(folder: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    assert main(["profile", str(PIPELINE), "--set", CPU, "--set", f"source.dtype={dtype}", "--json", "-"]) == 0
    report = RestoreReport.from_json(capsys.readouterr().out)
    fits_together(report)
    assert report.verified
    assert {Path(row.object).name for row in report.objects} == {"large.safetensors", "small.safetensors"}
    assert [row.name for row in report.stages] == ["read", "place"]
    assert all(row.verify_s > 0 and row.first_byte_s is None for row in report.objects)
    assert any(row.cast_s > 0 for row in report.objects) is (dtype == "bfloat16")


def test_what_people_read(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(PIPELINE), "--set", CPU, "--cold", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("restore: 15.05 MB in ")
    assert max(map(len, lines)) <= 80
    files = {path.suffix: path for path in (tmp_path / "out").iterdir()}
    report = RestoreReport.from_json(files[".json"].read_text())
    assert files[".txt"].read_text() == to_text(report)
    assert report.note in to_text(report)
    assert "large.safetensors" in to_text(report)


@pytest.mark.parametrize(
    "options", [["--what-if"], ["--steps", "3"], ["--step-time", "3ms"], ["--fail-if", "stall>5%"]]
)
def test_options_for_batches_are_refused(folder: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert main(["profile", str(PIPELINE), *options]) == 2
    assert "--cold, --json, --out and --set apply" in capsys.readouterr().err


@pytest.mark.parametrize("is_packed", [False, True])
def test_from_where_it_was_read(folder: Path, is_packed: bool) -> None:
    strange = folder / "notes.bin"
    strange.write_bytes(bytes(30_000_000))  # never read
    config = Pipeline.checkpoint(str(folder)).read().config
    if is_packed:
        pack(sorted({*folder.iterdir()} - {strange}), folder, folder.parent / "c.tar")
        config = Pipeline.checkpoint(str(folder.parent / "c.tar")).read().config
    files = [str(path) for path in folder.parent.rglob("*.*")]
    if not all(map(is_out_of_the_page_cache, files)):
        pytest.skip("the files of this filesystem are nowhere but in memory")
    note = profile_restore(config, cold=False).note  # but for the descriptions, which were read before
    assert note == "both from disk" or note.endswith("lay in the page cache at first, and nothing for the bare read")
    for path in files:
        Path(path).read_bytes()  # whether the reads left them there depends on how much the kernel read ahead
    assert profile_restore(config, cold=False).note == "both from the page cache"
    assert profile_restore(config, cold=True).note == "both from disk"


@pytest.mark.parametrize(
    ("share", "expected", "num_evicted"),
    [
        (0.0, "both from disk", 1),
        (0.04, "4% lay in the page cache at first, and nothing for the bare read", 1),
        (0.6, "60% lay in the page cache at first, and all for the bare read", 0),
        (1.0, "both from the page cache", 0),
    ],
)
def test_the_bare_read_finds_what_the_restore_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, share: float, expected: str, num_evicted: int
) -> None:
    evicted: list[object] = []
    monkeypatch.setattr("loaderkit.profile.restore_report.cached_share", lambda ranges: share)
    monkeypatch.setattr("loaderkit.profile.restore_report.evict", evicted.append)
    assert profile_restore(Pipeline.checkpoint(str(folder)).read().config, cold=False).note == expected
    assert len(evicted) == num_evicted


def test_cold_is_cold_where_the_page_cache_is_not_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[list[str]] = []
    monkeypatch.setattr("loaderkit.profile.restore_report.cached_share", lambda ranges: None)
    monkeypatch.setattr("loaderkit.profile.restore_report.evict", lambda paths: evicted.append(sorted(paths)))
    config = Pipeline.checkpoint(str(folder)).read().config
    assert profile_restore(config, cold=False).note == ""
    assert not evicted
    profile_restore(config, cold=True)
    assert evicted == [[str(folder / f"{name}.safetensors") for name in ("large", "small")]] * 2


@pytest.mark.parametrize("where", ["c", "c.tar"])
def test_in_a_bucket_first_bytes_are_told_from_the_rest(
    folder: Path, tmp_path: Path, seaweed: Seaweed, s3_keys: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "indexes"))
    (tmp_path / "up").mkdir()
    pack(sorted(folder.iterdir()), folder, tmp_path / "up" / "c.tar")
    folder.rename(tmp_path / "up" / "c")
    bucket = f"profile-{where.replace('.', '-')}"
    upload(seaweed, tmp_path / "up", bucket)
    config = Pipeline.checkpoint(f"s3://{bucket}/{where}").read().config
    report = profile_restore(config, cold=False)
    fits_together(report)
    assert all(row.first_byte_s is not None and row.first_byte_s > 0 for row in report.objects)
    assert report.store["first_byte_s"] > 0
    assert report.note == ""
    with pytest.raises(ConfigError, match=r"--cold: s3://.* lies in no files of this machine"):
        profile_restore(config, cold=True)


def test_what_is_wrong_with_a_checkpoint_is_told_as_that(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "small.safetensors").write_bytes(b"\xff" * 100)
    assert main(["profile", str(PIPELINE), "--set", CPU, "--set", "source.verify=false"]) == 1
    said = capsys.readouterr().err
    assert "small.safetensors" in said
    assert "--cold" not in said


def test_ctrl_c_leaves_a_report_on_what_was_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads = itertools.count()

    def interrupting(read: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(self: FileConnector, key: str, start: int, buffer: memoryview, **more: Any) -> Any:
            if len(buffer) > 2**20 and next(num_reads) == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return read(self, key, start, buffer, **more)

        return interrupted

    for name in ("read_into", "read_direct", "read_hashed"):
        monkeypatch.setattr(FileConnector, name, interrupting(getattr(FileConnector, name)))
    path = tmp_path / "report.json"
    before = set(threading.enumerate())
    assert main(["profile", str(PIPELINE), "--set", CPU, "--json", str(path)]) == 128 + signal.SIGINT
    report = RestoreReport.from_json(path.read_text())
    assert (report.partial, report.bare_bytes_per_s, report.percent_of_bare) == ("interrupted", None, None)
    assert report.num_tensors < 22
    captured = capsys.readouterr()
    assert 0 <= " ".join(captured.out.split()).find("(partial: interrupted)") < 120
    assert f"the report is on {report.num_tensors} tensors" in captured.err
    assert set(threading.enumerate()) <= before


def test_ctrl_c_in_the_bare_read_leaves_a_report_as_well(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loaderkit.profile.restore_report.read_raw", interrupted)
    assert main(["profile", str(PIPELINE), "--set", CPU]) == 128 + signal.SIGINT
    assert 0 <= " ".join(capsys.readouterr().out.split()).find("(partial: interrupted in the bare read)") < 120


def test_the_same_engine_as_restore(folder: Path) -> None:
    config: Any = Pipeline.checkpoint(str(folder)).read().config
    report = profile_restore(config, cold=False)
    assert report.num_bytes == sum(t.nbytes for t in loaderkit.restore(folder).values())
