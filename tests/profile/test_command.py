"""`loaderkit profile`: what it prints and writes, its exit codes, and what is known before the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import HELPERS

from loaderkit._internal.config.yaml_text import from_yaml, to_yaml
from loaderkit.cli import main
from loaderkit.cli.experiments import parse_step_time
from loaderkit.diagnosis.verdict import Setting
from loaderkit.profile.experiments.search import Tuned
from loaderkit.profile.report import Report
from loaderkit.profile.report_parts import Rate


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOADERKIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(HELPERS))
    monkeypatch.setattr("loaderkit.cli.profile._HEADROOM_S", 0.5)  # enough to see that there are rates
    monkeypatch.setattr("loaderkit.profile.experiments.headroom._MOST_UNSURE", 1e9)  # a busy machine is no matter here
    monkeypatch.setattr("loaderkit.profile.experiments.headroom._NEARLY", 0.0)
    monkeypatch.setattr("loaderkit.cli.profile._TRIAL_S", 0.2)  # too short for most of these pipelines


@pytest.fixture
def pipeline(photos: Path, tmp_path: Path) -> Path:
    """60 photographs in 15 batches of 4."""
    description = {
        "name": "small",
        "source": {"kind": "files", "url": str(photos), "include": "**/*.jpg", "label": "parent"},
        "stages": ["read", "decode", {"center_crop": {"size": 16}}, {"batch": {"size": 4}}],
    }
    path = tmp_path / "small.yaml"
    path.write_text(to_yaml(description))
    return path


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    """Items that take 4 ms of waiting each, by one worker: more workers are faster, whatever the machine does besides."""
    path = tmp_path / "waiting.yaml"
    path.write_text(
        "# Tokens of the archive.\n"
        "name: waiting\n"
        'source: {kind: dataset, object: "profiled_pipelines:waiting", args: {seconds: 0.004}, thread_safe: true}  # slow\n'
        "stages:\n"
        "  - read   # an item at a time\n"
        "  - batch: {size: 4}\n"
        "prefetch:\n"
        "  concurrency: 1   # as it was on the laptop\n"
    )
    return path


def test_the_verdict_comes_first_and_fits_80_columns(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(pipeline), "--steps", "20", "--step-time", "1ms"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("small: the loop waited ")
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in captured.out
    for title in ("Where the time goes", "Slowest samples", "The first batch", "Headroom"):
        assert title in lines
    assert captured.err == ""


def test_json_on_stdout_is_the_report_alone(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(pipeline), "--steps", "20", "--json", "-"]) == 0
    report = Report.from_json(capsys.readouterr().out)
    assert (report.name, report.num_batches, report.steps.num_steps) == ("small", 21, 20)
    assert report.first_batch is not None
    assert report.first_batch.import_s is not None
    assert report.first_batch.import_s > 0
    assert report.headspace is not None
    assert report.headspace.consumer is None


@pytest.fixture
def waits_long(waiting: Path) -> Path:
    """The same with 50 ms an item: a verdict on it is the same where other programs take most of the CPUs."""
    waiting.write_text(waiting.read_text().replace("seconds: 0.004", "seconds: 0.05"))
    return waiting


def test_out_gets_report_text_and_patch(waits_long: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "profiles"
    assert main(["profile", str(waits_long), "--steps", "12", "--out", str(out)]) == 0
    found = {path.suffix: path for path in out.iterdir()}
    report = Report.from_json(found[".json"].read_text())
    assert found[".txt"].read_text().startswith("waiting: the loop waited")
    assert [setting.key for setting in report.verdict.settings] == ["prefetch.concurrency"]
    subprocess.run(["patch", waits_long, found[".patch"]], check=True, capture_output=True)
    text = waits_long.read_text()
    assert from_yaml(text)["prefetch"]["concurrency"] == report.verdict.settings[0].value > 1
    assert "# as it was on the laptop" in text


def test_no_report_takes_the_place_of_another_one(
    waiting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one job end in the same second."""
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    monkeypatch.setattr("loaderkit.cli.outputs.datetime", SimpleNamespace(now=lambda zone: moment))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["profile", str(waiting), "--steps", "2", "--out", str(tmp_path / "out")]) == 0
    names = sorted(path.name for path in (tmp_path / "out").glob("*.json"))
    stem = "waiting-20260102-030405"
    assert names == [f"{stem}-rank0.json", f"{stem}-rank1-2.json", f"{stem}-rank1.json"]


class TestFailIf:
    def test_exits_with_1_and_the_figure(self, waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["profile", str(waiting), "--steps", "8", "--fail-if", "stall>5%", "--fail-if", "stall>100%"]) == 1
        assert capsys.readouterr().err.startswith("failed: stall is ")

    def test_exits_with_0_where_it_does_not_hold(self, waiting: Path) -> None:
        assert main(["profile", str(waiting), "--steps", "8", "--fail-if", "samples_per_s<0.01"]) == 0

    @pytest.mark.parametrize("condition", ["stall", "stahl>5%", "stall>much"])
    def test_a_wrong_condition_exits_with_2_before_the_run(
        self, condition: str, pipeline: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["profile", str(pipeline), "--fail-if", condition]) == 2
        captured = capsys.readouterr()
        assert condition in captured.err
        assert captured.out == ""


@pytest.mark.parametrize(
    "options",
    [
        ["--json", "nowhere/report.json"],
        ["--json", "."],
        ["--out", "small.yaml"],
        ["--out", "small.yaml/below"],
        ["--steps", "3", "--seconds", "3"],
        ["--step-time", "1ms", "--consumer", "profiled_pipelines:step"],
        ["--step-time", "soon"],
        ["--step-time", "100"],
        ["--step-time", "100ms+-"],
        ["--step-time", "100ms+-10"],
        ["--step-time", "100ms+-10ms+-1ms"],
        ["--consumer", "profiled_pipelines:missing"],
        ["--consumer", "no_such_module:step"],
        ["--consumer", "profiled_pipelines:not_callable"],
        ["--consumer", "step"],
    ],
)
def test_wrong_use_is_known_before_the_run(
    options: list[str], pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(pipeline), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "times"),
    [("100ms", (0.1, 0.0)), ("1.5s+-10ms", (1.5, 0.01)), ("80ms ± 10ms", (0.08, 0.01)), ("0s", (0.0, 0.0))],
)
def test_the_time_of_a_step(text: str, times: tuple[float, float]) -> None:
    assert parse_step_time(text) == times


def test_an_unwritable_folder_is_known_before_the_run(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(pipeline), "--json", "/proc/report.json"]) == 2  # root may write anywhere else
    assert "cannot be written" in capsys.readouterr().err


def test_a_consumer_is_called_with_every_batch(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(waiting), "--steps", "8", "--consumer", "profiled_pipelines:step", "--json", "-"]) == 0
    headroom = Report.from_json(capsys.readouterr().out).headspace
    assert headroom is not None
    assert headroom.consumer is not None
    assert headroom.factor is not None
    assert headroom.factor < 1


def test_a_consumer_that_fails_leaves_a_report(
    waiting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert main(["profile", str(waiting), "--consumer", "profiled_pipelines:failing", "--json", str(path)]) == 1
    assert Report.from_json(path.read_text()).partial == "ended by ArithmeticError: the loss is not a number"
    assert "the loss is not a number" in capsys.readouterr().err


def test_a_consumer_may_take_its_batch_apart(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["profile", str(waiting), "--steps", "8", "--consumer", "profiled_pipelines:popping", "--json", "-"]) == 0
    )
    headroom = Report.from_json(capsys.readouterr().out).headspace
    assert headroom is not None
    assert headroom.consumer is not None


def test_ctrl_c_after_the_loop_keeps_what_was_measured(
    waiting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loaderkit.profile.whatif.table.verify", interrupted)
    monkeypatch.setattr("loaderkit.cli.profile._CHECK_S", 1.0)
    path = tmp_path / "report.json"
    options = ["--steps", "20", "--what-if", "--verify", "--json", str(path)]
    assert main(["profile", str(waiting), *options]) == 128 + signal.SIGINT
    report = Report.from_json(path.read_text())
    assert report.partial == "interrupted after the loop"
    assert report.headspace is not None
    assert report.verdict.check is not None
    assert report.what_if


def test_epochs_of_one_batch_have_rates(photos: Path, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "stages.batch.size=60", "--steps", "4", "--step-time", "1ms"]
    assert main(["profile", str(pipeline), *options, "--json", "-"]) == 0
    headroom = Report.from_json(capsys.readouterr().out).headspace
    assert headroom is not None
    assert headroom.warm is not None
    assert headroom.warm.num_batches > 0
    assert headroom.warm.samples_per_s > 0


@pytest.mark.prove
@pytest.mark.alone
@pytest.mark.parametrize("is_locked", [False, True])
def test_what_it_says_to_set_is_tried_first(
    is_locked: bool, waiting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that sleep: at the same time, or one after the other under a lock."""
    monkeypatch.setattr("loaderkit.cli.profile._TRIAL_S", 20.0)
    function = "waiting_in_turn" if is_locked else "waiting"
    waiting.write_text(waiting.read_text().replace("profiled_pipelines:waiting", f"profiled_pipelines:{function}"))
    out = tmp_path / "out"
    assert main(["profile", str(waiting), "--set", "prefetch.concurrency=2", "--steps", "200", "--out", str(out)]) == 0
    found = {path.suffix: path for path in out.iterdir()}
    report = Report.from_json(found[".json"].read_text())
    verdict = report.verdict
    assert (verdict.stage, verdict.kind) == ("read", "lock" if is_locked else "latency")
    assert verdict.tried is not None
    assert verdict.tried.before is not None
    if is_locked:
        assert (verdict.settings, report.patch, ".patch" in found) == ([], None, False)
    else:
        assert verdict.tried.outcome == "faster"
        assert found[".patch"].read_text().startswith("tried: ")
        assert report.patch is not None
        assert "# tried: " in report.patch


INTERRUPTING = """
import os, signal

count = 0

def step(batch):
    global count
    count += 1
    if count == 5:
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_writes_what_was_seen(waiting: Path, tmp_path: Path) -> None:
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    path = tmp_path / "report.json"
    options = ["--consumer", "interrupting:step", "--json", str(path)]
    command = [sys.executable, "-m", "loaderkit", "profile", str(waiting), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS.parents[1]), str(HELPERS)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGINT
    report = Report.from_json(path.read_text())
    assert report.partial == "interrupted"
    assert report.num_batches == 5
    assert 0 <= " ".join(done.stdout.split()).find("partial: interrupted") < 120
    assert done.stderr.strip().endswith("the report is on 5 batches")


def test_cold_files_are_measured(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(pipeline), "--steps", "8", "--cold", "--json", "-"]) == 0
    headroom = Report.from_json(capsys.readouterr().out).headspace
    assert headroom is not None
    assert headroom.warm is not None
    assert headroom.cold is not None
    assert headroom.fetch_percent is not None
    assert headroom.preprocess_percent == pytest.approx(100 - headroom.fetch_percent)


def test_cold_says_why_it_cannot(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(waiting), "--steps", "8", "--cold", "--json", "-"]) == 0
    headroom = Report.from_json(capsys.readouterr().out).headspace
    assert headroom is not None
    assert headroom.cold is None
    assert "data set of Python objects" in headroom.cold_note


def test_predictions_and_the_verdict_are_checked(
    waits_long: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loaderkit.cli.profile._VERIFY_S", 4.0)
    monkeypatch.setattr("loaderkit.cli.profile._CHECK_S", 2.0)
    monkeypatch.setattr("loaderkit.profile.whatif.table._MOST_ERROR", 1e9)  # a busy machine is no matter here
    assert main(["profile", str(waits_long), "--steps", "12", "--what-if", "--verify", "--json", "-"]) == 0
    report = Report.from_json(capsys.readouterr().out)
    assert report.verdict.check is not None
    assert report.verdict.check.stage == "read"
    assert report.verdict.check.expected_percent > 40
    rows = {row.name: row for row in report.what_if}
    doubled = rows["2 workers instead of 1"]
    assert doubled.speedup > 1.5
    assert doubled.measured is not None
    assert rows["half the latency of the store"].measured is None
    assert all(row.can_run == bool(row.settings) for row in rows.values())


FASTER = Tuned(
    settings=[Setting(key="prefetch.concurrency", before=1, value=8)],
    before=Rate(samples_per_s=240.0, interval_percent=1.0, seconds=1.0, num_batches=60),
    after=Rate(samples_per_s=1900.0, interval_percent=1.0, seconds=1.0, num_batches=480),
    stall_before_percent=99.0,
    stall_after_percent=90.0,
    speedup=7.9,
    interval=0.2,
    decisions=[],
    trials=[],
    seconds=8.0,
)
PERHAPS = FASTER.model_copy(update={"settings": [], "offered": FASTER.settings, "outcome": "likely"})
NO_FASTER = FASTER.model_copy(update={"settings": [], "speedup": 1.01, "outcome": "no better"})


class TestTune:
    """What the command does with what a search has found. The searches are the profiler's."""

    @pytest.fixture(autouse=True)
    def _found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = FASTER
        monkeypatch.setattr("loaderkit.profile.experiments.search.tune", lambda *args, **options: self.found)

    def test_writes_what_is_faster_with_comments(self, waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
        mode = waiting.stat().st_mode
        assert main(["tune", str(waiting), "--json", "--write"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["speedup"], told["written"]) == (7.9, True)
        text = waiting.read_text()
        assert from_yaml(text)["prefetch"]["concurrency"] == 8
        lines = text.splitlines()
        assert lines[0].startswith("# Tuned by `loaderkit tune` on ")
        assert "#   prefetch.concurrency: 8 (was 1)" in text
        assert {"# Tokens of the archive.", "  - read   # an item at a time"} <= set(lines)
        assert waiting.stat().st_mode == mode
        assert [path.name for path in waiting.parent.iterdir() if path.name.startswith(".")] == []

    def test_what_is_not_the_file_is_not_written_to_it(self, waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = waiting.read_text()
        assert main(["tune", str(waiting), "--write", "--set", "stages.batch.size=8"]) == 2
        assert "--set" in capsys.readouterr().err
        assert waiting.read_text() == before

    def test_shows_and_does_not_write(self, waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = waiting.read_text()
        assert main(["tune", str(waiting)]) == 0
        out = capsys.readouterr().out
        assert "+  concurrency: 8" in out
        assert "--write puts this into the file" in out
        assert waiting.read_text() == before

    def test_what_is_better_without_being_sure_is_offered(
        self, waiting: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.found = PERHAPS
        before = waiting.read_text()
        for options in ([], ["--write"], ["--apply", "sure"]):
            assert main(["tune", str(waiting), *options]) == 0
            out = capsys.readouterr().out
            assert "better, but not for sure" in out
            assert "+  concurrency: 8" in out
            assert "--apply best puts this into the file" in out
            assert waiting.read_text() == before
        assert main(["tune", str(waiting), "--write", "--apply", "best", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["settings"], told["outcome"], told["written"]) == ([], "likely", True)
        assert from_yaml(waiting.read_text())["prefetch"]["concurrency"] == 8

    @pytest.mark.parametrize("options", [["--apply", "sure"], ["--apply", "best"]])
    def test_what_is_sure_is_written_either_way(self, waiting: Path, options: list[str]) -> None:
        assert main(["tune", str(waiting), *options]) == 0
        assert from_yaml(waiting.read_text())["prefetch"]["concurrency"] == 8

    def test_where_nothing_is_faster_the_file_stays(self, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.found = NO_FASTER
        before = pipeline.read_text()
        assert main(["tune", str(pipeline), "--apply", "best"]) == 0
        assert "the file stays as it is" in capsys.readouterr().out
        assert pipeline.read_text() == before


def test_tune_searches(waiting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From one end to the other; what it finds is this machine's."""
    assert main(["tune", str(waiting), "--seconds", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["before"]["num_batches"] > 0
    assert told["after"]["num_batches"] > 0
    settings = {"sure": told["settings"], "likely": told["offered"]}
    assert {outcome for outcome, some in settings.items() if some} == {told["outcome"]} - {"no better"}
    assert told["outcome"] == "no better" or told["speedup"] >= 1
    assert max(told["num_faster"], told["num_waiting_less"]) <= told["num_pairs"]
    assert told["written"] is False


@pytest.mark.prove
@pytest.mark.alone
def test_tune_finds_what_is_faster(waiting: Path, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(waiting), "--seconds", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["speedup"] > 1
    assert {one["key"]: one["value"] for one in told["settings"]}["prefetch.concurrency"] > 1
    assert main(["tune", str(pipeline), "--seconds", "6", "--step-time", "60ms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == []


def test_help_names_no_option_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--what-if" in out
    assert "--verify" in out
