"""The command line: what it prints where, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loaderkit import Pipeline, build
from loaderkit._internal.config.yaml_text import from_yaml, to_yaml
from loaderkit.cli import main
from loaderkit.cli.run import progress

SCRIPT = Path(sys.executable).parent / "loaderkit"

RECORDER = """
import signal

def note(batch, path):
    with open(path, "a") as file:
        file.write(" ".join(batch["__key__"]) + "\\n")

def interrupt(batch, path):
    note(batch, path)
    with open(path) as file:
        if len(file.readlines()) == 3:
            signal.raise_signal(signal.SIGINT)

def refuse(sample):
    raise RuntimeError("no such luck")
"""


@pytest.fixture(autouse=True)
def recorder(own_folder: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The module of that name, with the import path put back afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "recorder", raising=False)
    (tmp_path / "recorder.py").write_text(RECORDER)


@pytest.fixture
def pipeline(photos: Path, tmp_path: Path) -> Path:
    """60 photographs in 15 batches of 4."""
    description = {
        "name": "small",
        "source": {"kind": "files", "url": str(photos), "include": "**/*.jpg", "label": "parent"},
        "order": {"seed": 5},
        "stages": ["read", "decode", {"random_resized_crop": {"size": 16}}, {"batch": {"size": 4}}, "normalize"],
    }
    path = tmp_path / "small.yaml"
    path.write_text(to_yaml(description))
    return path


def recorded(pipeline: Path, function: str = "note") -> Path:
    """The same pipeline, which also notes the keys of every batch in keys.txt; it makes no batch ahead."""
    description = from_yaml(pipeline.read_text())
    description["stages"].append({"call": {"function": f"recorder:{function}", "args": {"path": "keys.txt"}}})
    description["prefetch"] = {"executor": "inline", "batches": 1}
    path = pipeline.with_name("recorded.yaml")
    path.write_text(to_yaml(description))
    return path


class TestRun:
    def test_json_is_the_only_thing_on_stdout(self, pipeline: Path) -> None:
        done = subprocess.run([SCRIPT, "run", pipeline, "--json"], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert (found["pipeline"], found["epochs"], found["batches"], found["samples"]) == ("small", 1, 15, 60)
        assert found["wall_s"] > 0
        assert set(found["stats"]["stall"]) == {"total_s", "percent", "by_stage"}

    def test_summary_fits_80_columns_without_colour(self, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
        long_name = "stages.random_resized_crop.name=random_horizontal_flip"  # the longest name there is
        assert main(["run", str(pipeline), "--step-time", "1ms", "--set", long_name]) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith("small: 15 batches, 60 samples in ")
        tables, _, reading = captured.out.rstrip().rpartition("\n")
        assert all(len(line) <= 80 for line in tables.splitlines())
        assert "\x1b" not in captured.out
        rows = [line.split() for line in tables.splitlines()]
        assert ["stage", "workers", "items", "busy", "of", "it", "cpu", "starved", "blocked", "idle"] in rows
        assert any(row[:1] == ["random_horizontal_flip"] and len(row) == 8 for row in rows)
        assert reading.startswith("Verdict: ")
        assert " To change: " in reading
        assert captured.err == ""

    def test_epochs_and_batches(self, pipeline: Path, ask: Callable[..., Any]) -> None:
        found = ask("run", pipeline, "--epochs", "3", "--batches", "20")
        assert (found["epochs"], found["batches"], found["samples"]) == (1, 20, 80)
        assert ask("run", pipeline, "--epochs", "3", "--set", "order.epochs=2")["batches"] == 30

    def test_set_takes_scalars_and_lists(self, pipeline: Path, ask: Callable[..., Any]) -> None:
        sets = (
            "stages.batch.size=7",
            "source.limit=20",
            "source.include=**/*.jpg",
            "stages.random_resized_crop.scale=[0.5, 1]",
        )
        found = ask("explain", pipeline, *(word for text in sets for word in ("--set", text)))
        assert (found["num_samples"], found["batches_per_epoch"]) == (20, 3)
        crop = next(stage for stage in found["config"]["stages"] if "random_resized_crop" in stage)
        assert crop["random_resized_crop"]["scale"] == [0.5, 1.0]

    @pytest.mark.parametrize("first", [1, 7, 15, 16])
    def test_resume_continues_exactly(self, pipeline: Path, ask: Callable[..., Any], first: int) -> None:
        path, keys, state = recorded(pipeline), Path("keys.txt"), Path("state.json")
        ask("run", path, "--epochs", "2")
        whole = keys.read_text().splitlines()
        assert len(whole) == 30
        keys.unlink()

        ask("run", path, "--epochs", "2", "--batches", str(first), "--save-state", state)
        assert keys.read_text().splitlines() == whole[:first]
        epochs = "1" if first >= 15 else "2"
        found = ask("run", path, "--epochs", epochs, "--resume", state, "--save-state", state)
        assert keys.read_text().splitlines() == whole
        assert (found["epochs"], found["batches"]) == (int(epochs), 30 - first)
        saved = json.loads(state.read_text())
        assert (saved["epoch"], saved["position"]) == (2, 0)
        assert not list(Path().glob(".*.tmp"))

    def test_ctrl_c_saves_the_state_and_exits_with_130(
        self, pipeline: Path, capsys: pytest.CaptureFixture[str], ask: Callable[..., Any]
    ) -> None:
        path, keys = recorded(pipeline, "interrupt"), Path("keys.txt")
        assert main(["run", str(path), "--save-state", "state.json"]) == 130
        captured = capsys.readouterr()
        assert captured.out == ""
        assert (
            captured.err
            == "interrupted after 2 batches; the state is in state.json, continue with --resume state.json\n"
        )
        assert json.loads(Path("state.json").read_text())["position"] == 8  # the third batch was never delivered
        third = keys.read_text().splitlines()[2]
        ask("run", path, "--resume", "state.json", "--batches", "1")
        assert keys.read_text().splitlines()[3] == third

    def test_progress_line_every_few_seconds(self, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
        times = iter([0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0])
        with build(pipeline) as loader, progress(loader, 100, lambda: next(times)) as show:
            for num_batches in range(1, 7):
                show(num_batches)
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(",")[0] for line in lines] == ["batch 3 of 100", "batch 6 of 100"]
        assert lines[0].endswith(" 194 s left")

    def test_progress_bar_on_a_terminal(
        self, pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert main(["run", str(pipeline), "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["batches"] == 15
        assert "/15" in captured.err


class TestExitCodes:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["bogus"], "No such command 'bogus'"),
            (["run"], "Missing argument 'P'"),
            (["run", "P", "--bogus"], "No such option"),
            (["run", "P", "--epochs", "0"], "--epochs"),
            (["run", "P", "--step-time", "soon"], "a duration with its unit, such as 80ms"),
            (
                ["run", "P", "--step-time", "100"],
                "a duration with its unit, such as 80ms, 1.5s or 80ms+-10ms, not '100'",
            ),
            (["run", "P", "--resume", "nothing.json"], "nothing.json"),
            (["run", "P", "--save-state", "no/folder.json"], "there is no folder"),
            (["run", "P", "--set", "stages.batch.size"], "is not KEY=VALUE"),
            (["run", "P", "--set", "stages.batch.size=["], "is not YAML"),
            (["run", "P", "--set", "name=2024-13-45"], "is not YAML"),
            (["run", "P", "--set", "stages.bath.size=2"], "did you mean 'batch'"),
            (["check", "P", "--set", "stages.batch.size=0"], "expected greater than 0"),
            (["explain", "nothing.yaml"], "No such file"),
            (
                ["check", "P", "--set", "stages.batch.size=100", "--set", "stages.batch.drop_last=true"],
                "no batch at all",
            ),
            (["check", "P", "--set", "prefetch.memory=1KiB"], "prefetch.memory"),
            (["index"], "Missing argument 'FILE...'"),
        ],
    )
    def test_wrong_use_is_2(
        self, pipeline: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
    ) -> None:
        assert main([str(pipeline) if word == "P" else word for word in arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert said in captured.err
        assert "Traceback" not in captured.err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["run", "P", "--set", "source.url=nowhere"], "nowhere"),
            (["check", "P", "--set", "source.include=*.bmp"], "no file below"),
            (["explain", "P", "--set", "source.url=nowhere"], "nowhere"),
            (["run", "P", "--resume", "P"], "holds no state"),
            (["run", "P", "--resume", "deep.json"], "holds no state"),
            (["run", "P", "--resume", "other.json"], "belongs to another data set"),
            (["index", "nothing.tar"], "nothing.tar"),
        ],
    )
    def test_failed_work_is_1(
        self, pipeline: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
    ) -> None:
        with build(pipeline, overrides={"source.limit": 10}) as loader:
            Path("other.json").write_text(json.dumps(loader.state_dict()))
        Path("deep.json").write_text("[" * 100_000)
        assert main([str(pipeline) if word == "P" else word for word in arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert said in captured.err

    def test_failing_stage_is_1_and_debug_shows_where(self, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
        description = from_yaml(pipeline.read_text())
        description["stages"].insert(2, {"call": {"function": "recorder:refuse"}})
        Path("failing.yaml").write_text(to_yaml(description))
        for command in ("check", "run"):
            assert main([command, "failing.yaml"]) == 1
            captured = capsys.readouterr()
            assert captured.err.startswith("error: call failed for sample ")
            assert "no such luck" in captured.err
            assert captured.err.count("\n") == 1
        assert main(["run", "failing.yaml", "--debug"]) == 1
        captured = capsys.readouterr()
        assert "Traceback" in captured.err
        assert 'raise RuntimeError("no such luck")' in captured.err

    def test_no_arguments_shows_the_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        captured = capsys.readouterr()
        assert all(f" {name} " in captured.out for name in ("run", "check", "explain", "index", "demo"))
        assert captured.err == ""

    def test_broken_pipe_is_silent(self, pipeline: Path) -> None:
        with subprocess.Popen(
            [SCRIPT, "explain", pipeline], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == 1

    def test_python_m_is_the_command(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "loaderkit", "run", "nothing.yaml"], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "nothing.yaml" in done.stderr

    @pytest.mark.parametrize(
        ("closed", "code", "said"), [(">&-", 1, "error: stdout is closed, and that"), ("2>&-", 0, "")]
    )
    @pytest.mark.matrix(1)
    def test_closed_streams(self, pipeline: Path, closed: str, code: int, said: str) -> None:
        command = f'exec "$1" run "$2" --batches 2 {closed}'
        done = subprocess.run(["sh", "-c", command, "sh", SCRIPT, pipeline], capture_output=True, text=True)
        assert done.returncode == code
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == bool(said)
        assert ("2 batches" in done.stdout) == (code == 0)

    @pytest.mark.fresh_interpreters
    def test_help_does_not_import_torch(self) -> None:
        program = "import sys; from loaderkit.cli import main; main(['--help']); assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


class TestCheck:
    @pytest.mark.parametrize("command", ["check", "explain"])
    def test_several_processes_are_no_mistake(
        self, pipeline: Path, command: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = ["--set", "prefetch.executor=process", "--set", "prefetch.processes=2"]
        assert main([command, str(pipeline), *settings]) == 0
        captured = capsys.readouterr()
        assert (captured.err, caplog.text) == ("", "")
        assert "batches       15 per epoch on one rank, batch size 4\n" in captured.out.replace(
            "# batches   ", "batches       "
        )

    @pytest.mark.integration
    def test_actors_need_no_cluster(
        self, pipeline: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = ("executor=ray", "processes=4", "ray={num_cpus: 2}", "batches=8")
        sets = [word for setting in settings for word in ("--set", f"prefetch.{setting}")]
        assert main(["check", str(pipeline), *sets]) == 0
        captured = capsys.readouterr()
        assert "executor      ray, not tried: " in captured.out
        assert (captured.err, caplog.text) == ("", "")
        assert main(["explain", str(pipeline), *sets]) == 0
        out = capsys.readouterr().out
        assert (
            " here; of the Ray cluster 2 for each actor\n# executor  4 times ray, 8 batches ahead\n# pool      8 "
            in out
        )
        assert main(["check", str(pipeline), *sets, "--set", "prefetch.processes=9"]) == 2
        assert "allow at least 9 batches" in capsys.readouterr().err

    def test_says_what_is_there(self, pipeline: Path, ask: Callable[..., Any], photos: Path) -> None:
        found = ask("check", pipeline)
        assert (found["num_samples"], found["batches_per_epoch"], found["classes"]) == (60, 15, ["ant", "bee", "cat"])
        assert found["first_sample"]["key"] == "ant/000.jpg"
        assert found["first_sample"]["num_bytes"] == (photos / "ant/000.jpg").stat().st_size
        assert {"name": "image", "dtype": "float32", "shape": [3, 16, 16]} in found["fields"]
        assert {"name": "label", "dtype": "int64", "shape": []} in found["fields"]
        assert {"name": "__key__", "dtype": "str", "shape": None} in found["fields"]

    def test_text(self, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check", str(pipeline), "--set", "output=[label, image]"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("small: it works\n")
        assert "classes       3: ant, bee, cat\n" in out
        assert "field         image: float32 3x16x16\n" in out

    def test_samples_of_other_shapes_are_found(self, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
        description = from_yaml(pipeline.read_text())
        description["stages"] = ["read", "decode", {"batch": {"size": 60}}]
        pipeline.write_text(to_yaml(description))
        assert main(["check", str(pipeline)]) == 1
        assert "batch failed for sample" in capsys.readouterr().err

    def test_bad_samples_are_counted_and_the_quarantine_left_alone(
        self, pipeline: Path, photos: Path, tmp_path: Path, ask: Callable[..., Any]
    ) -> None:
        shutil.copytree(photos, tmp_path / "damaged")
        (tmp_path / "damaged/bee/001.jpg").write_bytes(b"not a photograph")
        sets = (
            "source.url=damaged",
            "stages.batch.size=60",
            "errors.on_bad_sample=skip",
            "errors.quarantine=bad.jsonl",
        )
        found = ask("check", pipeline, *(word for text in sets for word in ("--set", text)))
        assert found["num_bad_in_first_batch"] == 1
        assert not Path("bad.jsonl").exists()

    def test_ignored_members_of_tar_shards(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "tars").mkdir()
        with tarfile.open(tmp_path / "tars/a.tar", "w") as tar:
            for name in ("0.txt", "README", ".hidden.txt", "1.txt"):
                member = tarfile.TarInfo(name)
                member.size = 2
                tar.addfile(member, io.BytesIO(b"hi"))
        Path("tars.yaml").write_text("source: {kind: tar, url: tars}\nstages: [read, decode, batch: {size: 2}]\n")
        assert main(["check", "tars.yaml"]) == 0
        out = capsys.readouterr().out
        assert "ignored       2 tar members" in out
        assert "field         txt: str\n" in out


class TestExplain:
    def test_text_is_the_same_pipeline(self, pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", str(pipeline), "--set", "stages.decode.workers=3"]) == 0
        out = capsys.readouterr().out
        Path("explained.yaml").write_text(out)
        expected = Pipeline.from_yaml(pipeline, overrides={"stages.decode.workers": 3})
        assert Pipeline.from_yaml("explained.yaml").to_yaml(defaults=True) == expected.to_yaml(defaults=True)
        assert "# pool      3 workers: decode\n" in out
        assert "antialias: true" in out

    def test_json(self, pipeline: Path, photos: Path, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
        found = ask("explain", pipeline, "--set", "prefetch.concurrency=4")
        assert (found["url"], found["rank"], found["world_size"]) == (str(photos), 1, 3)
        assert found["batches_per_epoch"] == 5
        assert sum(pool["workers"] for pool in found["tuning"]["pools"]) == found["tuning"]["concurrency"] == 4
        assert 1 <= found["num_cpus"] <= (os.cpu_count() or 1)
        assert found["config"]["prefetch"]["timeout"] == "60s"


@pytest.mark.parametrize("command", [["run", "--save-state", "out"], ["profile", "--seconds", "0.1", "--out", "out"]])
@pytest.mark.prove
def test_a_full_disk_is_named(pipeline: Path, command: list[str]) -> None:
    """A file that may have no byte fails as on a full disk: at the write, whose error names no file."""
    # dill, which torch imports where it is installed, writes a file as it is imported
    program = "import sys; sys.modules['dill'] = None; from loaderkit.cli import main; sys.exit(main(sys.argv[1:]))"
    python = [sys.executable, "-c", program, command[0], str(pipeline), *command[1:]]
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *python]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"File too large: '{Path.cwd()}/out" in done.stderr.splitlines()[-1]
    assert not [path for path in Path.cwd().rglob("*") if path.suffix == ".tmp"]


@pytest.mark.prove
def test_a_full_disk_under_the_standard_output(pipeline: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([SCRIPT, "check", pipeline], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "error: the standard output cannot be written: No space left on device\n",
    )
