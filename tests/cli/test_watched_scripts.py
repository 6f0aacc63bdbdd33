"""`loaderkit watch script.py`: the script runs as it does alone, and its loops are reported on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.data

from loaderkit.cli import main
from loaderkit.profile.report import Report

ROOT = Path(__file__).parents[2]

LOOP = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

def batches(number, size=2):
    return DataLoader(TensorDataset(torch.arange(number)), batch_size=size)

for batch in batches(12):
    pass
"""

ODDITIES = """
import atexit, json, multiprocessing, os, sys, threading, warnings
import __main__

def later():
    threading.main_thread().join()
    print("a thread that goes on", __main__.number)

def ending():
    print("at exit", __main__.number)

class Held:
    pass

number = 5
if __name__ == "__main__":
    import pickle
    names = ["__name__", "__file__", "__spec__", "__package__", "__cached__", "__doc__"]
    print(sys.argv, [globals()[name] for name in names], sys.path[0], type(__loader__).__name__, type(__builtins__).__name__)
    print([name for name in ("torch", "numpy") if name in sys.modules], sys.stdout.errors, os.getcwd())
    print(type(pickle.loads(pickle.dumps(Held()))) is Held, warnings.filters == warnings.filters[:], flush=True)
    warnings.warn("a warning of the script's", stacklevel=1)
    threading.Thread(target=later).start()
    atexit.register(ending)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(abs, [-1]))
    sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own; what a script may change is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("RANK", "WORLD_SIZE", "COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def run(script: str, *options: str, more: str = "", arguments: tuple[str, ...] = ()) -> int:
    Path(script).write_text(LOOP + more)
    iterate = torch.utils.data.DataLoader.__iter__
    try:
        return main(["watch", *options, script, *arguments])
    finally:
        assert torch.utils.data.DataLoader.__iter__ is iterate


def test_each_loader_has_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    again = "for _ in range(3):\n    for batch in batches(8, 4):\n        pass\n"
    assert run("train.py", "--json", "r.json", "--html", "r.html", more=again) == 0
    reports = [Report.from_json(Path(name).read_text()) for name in ("r.json", "r-2.json")]
    assert sorted(path.name for path in Path().glob("r*")) == ["r-2.html", "r-2.json", "r.html", "r.json"]
    # One that is made anew for each epoch is one loader, and that its data sets are several is said.
    assert [(report.num_batches, report.num_samples) for report in reports] == [(6, 12), (6, 24)]
    assert [report.name for report in reports] == [
        f"train.py: DataLoader of TensorDataset (train.py:{line})" for line in ("9", "12, 3 data sets")
    ]
    assert {report.partial for report in reports} == {None}
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("the loop waited") >= 2
    assert "written: " in said.err
    assert "<title>train.py" in Path("r.html").read_text()


HELPER = """
def loop(dataset, **options):
    for batch in DataLoader(dataset, batch_size=2, **options):
        pass

def numbers(number):
    return TensorDataset(torch.arange(number))
"""


@pytest.mark.parametrize(
    "loops",
    [
        "train, val = numbers(20), numbers(6)\nfor dataset in (train, val) * 2:\n    loop(dataset)",
        "for _ in range(2):\n    loop(numbers(20))\n    loop(numbers(6))",
        "train, val = [*range(20)], [*range(6)]\nfor dataset in (train, val) * 2:\n    loop(dataset)",
        "for _ in range(2):\n    loop([*range(20)])\n    loop([*range(6)])",
        "for n in (20, 6) * 2:\n    loop(numbers(n), shuffle=n == 20)",
    ],
    ids=["data sets", "lines", "lists", "lists made anew", "samplers"],
)
def test_loops_over_loaders_made_in_one_function_are_told_apart(loops: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train.py", "--json", "r.json", more=HELPER + loops) == 0
    reports = [Report.from_json(path.read_text()) for path in sorted(Path().glob("r*.json"))]
    assert sorted(report.num_batches for report in reports) == [6, 6, 20]  # the first is of the script's own loop
    capsys.readouterr()


@pytest.mark.parametrize(
    ("more", "code", "partial", "says"),
    [
        ("sys.exit(7)", 7, None, "the loop waited"),
        ("sys.exit()", 0, None, "the loop waited"),
        ("sys.exit('told')", 1, None, "told"),
        ("raise KeyError('boom')", 1, "ended by KeyError: 'boom'", 'train.py", line 11, in <module>'),
    ],
)
def test_it_ends_as_the_script_does(
    more: str, code: int, partial: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train.py", "--json", "r.json", more=more) == code
    said = capsys.readouterr().err
    assert says in said
    assert "loaderkit/cli" not in said
    assert "the loop waited" in said
    assert Report.from_json(Path("r.json").read_text()).partial == partial


def test_ctrl_c_ends_the_process_as_it_ends_python(rng: random.Random) -> None:
    """By the signal, after the handlers at exit: a shell's loop around it ends as well."""
    Path("train.py").write_text(
        LOOP + "import atexit, os, signal\n"
        "atexit.register(print, 'at exit', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    arguments = rng.choice([["train.py"], ["-m", "train"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    alone, watched = (
        subprocess.run([sys.executable, *more, *arguments], capture_output=True, text=True, env=environment)
        for more in ([], ["-m", "loaderkit", "watch", "--json", "r.json"])
    )
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout) == (-signal.SIGINT, "at exit\n")
    assert watched.stderr.count("Traceback") == alone.stderr.count("Traceback") == 1
    assert Report.from_json(Path("r.json").read_text()).partial == "interrupted"


def test_arguments_belong_to_the_script_and_ranks_have_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("train.py", "--json", "r.json", more="print(sys.argv)", arguments=("--json", "x", "-m", "--help")) == 0
    said = capsys.readouterr()
    assert said.out == "['train.py', '--json', 'x', '-m', '--help']\n"
    report = Report.from_json(Path("r-rank1.json").read_text())
    assert (report.rank, report.world_size) == (1, 2)
    assert "rank 1 of 2: the loop waited" in said.err.replace("\n", " ")


def test_a_module_is_run_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/train.py").write_text(LOOP + "print(__spec__.name, sys.argv[1:], sys.path[0])")
    assert main(["watch", "-m", "package.train", "--lr", "1"]) == 0
    said = capsys.readouterr()
    assert said.out == f"package.train ['--lr', '1'] {Path.cwd()}\n"
    assert "package.train: DataLoader of TensorDataset (train.py:9)" in said.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothere.py"], "there is no file nothere.py"),
        (["--json", "no/r.json", "train.py"], "there is no folder"),
        ([], "Missing argument"),
        (["--hmtl", "x", "train.py"], "No such option"),
    ],
)
def test_wrong_use_runs_nothing(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("print('run')")
    assert main(["watch", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err


def test_without_a_loader_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("print('run')")
    assert main(["watch", "train.py"]) == 0
    said = capsys.readouterr()
    assert said.out == "run\n"
    assert "took no batch from a DataLoader" in said.err


def test_a_loader_without_a_batch_is_named_and_nothing_is_written_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(LOOP.replace("batches(12)", "batches(0)"))
    assert main(["watch", "--json", "r.json", "train.py"]) == 0
    said = capsys.readouterr().err
    assert "train.py: DataLoader of TensorDataset (train.py:9) gave no batch: its data set is empty" in said
    assert f"there is nothing to write to {Path.cwd() / 'r.json'}" in said
    assert not Path("r.json").exists()


def test_a_file_that_cannot_be_written_costs_neither_the_others_nor_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As where a disk is full, or the script has removed the folder; nothing is left of it."""
    Path("folder").mkdir()
    ending = "import os\nos.rmdir('folder')\nfor batch in batches(6):\n    pass\nsys.exit(5)"
    assert run("train.py", "--json", "folder/r.json", "--html", "r.html", more=ending) == 5
    said = capsys.readouterr().err
    for name in ("r.json", "r-2.json"):
        path = Path.cwd() / "folder" / name
        assert f"{path} was not written (No such file or directory): name another place by --json" in said
    assert sorted(path.name for path in Path().iterdir()) == ["r-2.html", "r.html", "train.py"]
    assert f"written: {Path.cwd() / 'r.html'}, {Path.cwd() / 'r-2.html'}" in said


def test_where_stderr_takes_nothing_the_files_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", full)
        assert run("train.py", "--json", "r.json", more="sys.exit(5)") == 5
    with contextlib.suppress(OSError):
        full.close()
    assert Report.from_json(Path("r.json").read_text()).num_batches == 6


@pytest.mark.fresh_interpreters
def test_a_script_sees_what_it_sees_alone(tmp_path: Path) -> None:
    """All that it can see of itself, warnings and exit code too; torch and NumPy are not imported before it does that."""
    (tmp_path / "other").mkdir()
    (tmp_path / "odd.py").write_text(ODDITIES)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.run(
            [sys.executable, *watch, "../odd.py", "--x", "3"],
            cwd=tmp_path / "other", env=environment, capture_output=True, text=True, timeout=60,
        )
        for watch in ([], ["-m", "loaderkit", "watch"])
    ]  # fmt: skip
    alone, watched = runs
    assert "a thread that goes on 5" in alone.stdout
    assert watched.stdout == alone.stdout
    assert watched.returncode == alone.returncode == 3
    assert watched.stderr.startswith(alone.stderr)


def test_a_script_that_is_terminated_ends_by_that_and_is_reported_on(tmp_path: Path) -> None:
    ending = """
import os, signal, time
loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=2, num_workers=1)
for number, batch in enumerate(loader):
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""
    (tmp_path / "train.py").write_text(LOOP + ending)
    ran = subprocess.run(
        [sys.executable, "-m", "loaderkit", "watch", "--json", "r.json", "train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == -signal.SIGTERM, ran.stderr
    report = Report.from_json(Path("r-2.json").read_text())
    assert (report.num_batches, report.partial) == (4, "terminated by SIGTERM")
    assert ran.stderr.count("written: ") == 1  # its worker has said nothing


@pytest.mark.prove
def test_a_child_that_the_script_forks_says_nothing(tmp_path: Path) -> None:
    """It comes to the script's end as well, and would write over what its parent has."""
    (tmp_path / "train.py").write_text(
        "import os\nchild = os.fork()\nif child:\n    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "loaderkit", "watch", "train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr
    assert ran.stderr.count("took no batch") == 1


def test_a_script_that_does_not_compile_has_the_traceback_of_python(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "excepthook", sys.__excepthook__
    )  # a process group puts another one in its place, for good
    assert run("train.py", more="x = (") == 1
    said = capsys.readouterr().err
    assert said.startswith(f'  File "{Path.cwd() / "train.py"}", line 11')
    assert "SyntaxError: " in said
