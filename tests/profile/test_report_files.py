"""`loaderkit profile`: its page, its trace, an earlier report beside it, reports shown again, and those of several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit.cli import main
from loaderkit.profile.report import Report


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("loaderkit.cli.profile._HEADROOM_S", 0.2)


@pytest.fixture
def pipeline(photos: Path, tmp_path: Path) -> Path:
    description = {
        "name": "small",
        "source": {"kind": "files", "url": str(photos), "include": "**/*.jpg", "label": "parent"},
        "stages": ["read", "decode", {"center_crop": {"size": 16}}, {"batch": {"size": 4}}],
    }
    path = tmp_path / "small.yaml"
    path.write_text(to_yaml(description))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["profile", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_page_trace_and_a_run_before(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, page, trace = (tmp_path / name for name in ("old.json", "new.json", "page.html", "trace.json"))
    assert run(capsys, pipeline, "--steps", 30, "--json", old)[0] == 0
    more = ("--html", page, "--trace", trace, "--baseline", old, "--json", new)
    code, out, err = run(capsys, pipeline, "--steps", 30, "--step-time", "2ms", *more)
    assert code == 0, err
    assert "Against the run of" in out
    assert "samples/s" in out
    assert max(map(len, out.splitlines())) <= 80
    report = Report.from_json(new.read_text())
    assert report.baseline is not None
    assert report.baseline.rows[0].name == "samples/s"
    assert json.loads(old.read_text())["baseline"] is None
    assert "Against the run of" in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"] == "wait" for event in events) == report.num_batches

    # What was written is shown again, and compared, without a run.
    code, out, err = run(capsys, new, "--baseline", old, "--html", tmp_path / "again.html", "--fail-if", "stall<=100%")
    assert code == 1
    assert "failed: stall is" in err
    assert "Against the run of" in out
    assert (tmp_path / "again.html").exists()


def test_ranks_together(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        assert run(capsys, pipeline, "--steps", 30, "--json", tmp_path / f"rank{rank}.json")[0] == 0
    ranks = sorted(tmp_path.glob("rank*.json"))
    code, out, err = run(capsys, "--merge", *ranks, "--json", "merged.json", "--html", "merged.html")
    assert code == 0, err
    assert "2 ranks of 2" in out
    assert max(map(len, out.splitlines())) <= 80
    merged = json.loads(Path("merged.json").read_text())
    assert [row["rank"] for row in merged["ranks"]] == [0, 1]
    assert "All ranks" in Path("merged.html").read_text()
    assert json.loads(run(capsys, "--merge", *ranks, "--json", "-")[1]) == merged


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["small.yaml", "--html", "no/page.html"], "--html: there is no folder"),
        (["small.yaml", "--trace", "no/trace.json"], "--trace: there is no folder"),
        (["small.yaml", "--baseline", "none.json"], "none.json cannot be read: No such file"),
        (["small.yaml", "--baseline", "small.yaml"], "is no report that `loaderkit profile --json` has written: Invalid JSON"),
        (["small.yaml", "--baseline", "other.json"], "has written: name: Field required"),
        (["small.yaml", "small.yaml"], "the reports of several ranks need --merge"),
        (["--merge", "small.yaml", "small.yaml"], "is no report"),
        (["old.json", "--steps", "3"], "only shown again: nothing is measured"),
        (["old.json", "--trace", "trace.json"], "only shown again"),
        (["--merge", "old.json"], "reports of at least two ranks"),
        (["--merge", "old.json", "old.json", "--baseline", "old.json"], "no other options than --json and --html"),
    ],
)  # fmt: skip
def test_wrong_use_is_told_before_anything_runs(
    pipeline: Path, small: str, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    Path("old.json").write_text(small)
    Path("other.json").write_text('{"epoch": 3}')
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert complaint in " ".join(err.split())
    assert out == ""


def test_a_report_of_another_version_is_refused(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {**json.loads(small), "schema_version": 99}
    Path("old.json").write_text(json.dumps(found))
    code, _, err = run(capsys, "old.json")
    assert code == 2
    assert "version 99" in err


@pytest.fixture(scope="module")
def small(photos: Path) -> str:
    """A report as JSON."""
    import loaderkit

    pipeline = loaderkit.Pipeline.files(photos, include="**/*.jpg").read().decode().center_crop(16).batch(4)
    with loaderkit.build(pipeline) as loader, loader.profile() as report:
        list(loader)
    text: str = report.result.to_json()
    return text
