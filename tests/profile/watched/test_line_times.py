"""Which line of a script makes its batches: on time that is counted by hand, and on scripts with one slow line."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slow_lines
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from loaderkit.cli import main
from loaderkit.diagnosis.watched.lines import COLLATE, OTHER, TRANSFORM
from loaderkit.native import take_sample, wait_to_sample
from loaderkit.profile.render.html import to_html
from loaderkit.profile.render.terminal import to_text
from loaderkit.profile.report import Report
from loaderkit.profile.watched import sampling
from loaderkit.profile.watched.lines import LoaderLines
from loaderkit.profile.watched.sampling import Sampler, place_of

ROOT = Path(__file__).parents[3]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])


class Clock:
    """Each time that it is read some time has passed, which belongs to the label that was set last."""

    def __init__(self, rng: random.Random) -> None:
        self.now_s, self.label, self._rng = 0.0, "", rng
        self.spent_s: defaultdict[str, float] = defaultdict(float)

    def __call__(self) -> float:
        seconds = self._rng.uniform(0.01, 0.1)
        self.now_s += seconds
        self.spent_s[self.label] += seconds
        return self.now_s


class Samples(Dataset[Any]):
    def __init__(self, clock: Clock, sample: Callable[[], None]) -> None:
        self.clock, self.sample = clock, sample

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.label = "first"
        self.sample()  # first
        if index % 3 == 0:
            self.help()
        return torch.tensor([index])

    def help(self) -> None:
        self.clock.label = "transform"
        [*(self.sample() for _ in self.transform())]  # transform
        self.clock.label = "json"
        json.dumps(self, default=lambda _: self.sample())  # json, whose function is not the deepest frame

    def transform(self) -> str:
        return "ab"


class Stream(Samples, IterableDataset[Any]):
    def __iter__(self) -> Any:
        for index in range(12):
            self.clock.label = "stream"
            self.sample()  # stream
            yield torch.tensor([index])


def test_time_goes_to_lines_of_the_data_set_and_to_none_outside(rng: random.Random) -> None:
    """All of it, each to the line in which it was spent, and nothing of the training step."""
    clock = Clock(rng)
    sampler = Sampler(clock)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        clock.label = "collate"
        sampler.sample()  # collate
        return torch.stack(samples)

    lines = LoaderLines(lambda: sampler, [str(Path(__file__).parent)])
    for kind in (Samples, Stream):
        iterator = iter(DataLoader(kind(clock, sampler.sample), batch_size=4, collate_fn=collate))
        for _ in range(3):
            clock.label = "outside"
            lines.resume()
            next(iterator)
            clock.label = "outside"
            sampler.sample()  # the training step
    times, spent_s = lines.times(), clock.spent_s
    assert times is not None
    inside = {name: seconds for name, seconds in spent_s.items() if name not in ("", "outside")}
    assert {
        line.source.partition("# ")[2].partition("(")[0].partition(",")[0]: line.seconds for line in times.lines
    } == (pytest.approx(inside))
    assert {line.source.partition("# ")[2][:5]: line.part for line in times.lines} == {
        "first": "__getitem__", "trans": "__getitem__", "json,": "__getitem__", "strea": "__iter__", "colla": "collate_fn",
    }  # fmt: skip
    assert times.num_samples == 12 + 4 * 2 + 4 + 12 + 6
    assert times.seconds == pytest.approx(sum(inside.values()))
    groups = {
        TRANSFORM: spent_s["transform"],
        COLLATE: spent_s["collate"],
        OTHER: spent_s["first"] + spent_s["stream"] + spent_s["json"],
    }
    groups = {group: 100 * seconds / times.seconds for group, seconds in groups.items() if seconds}
    assert times.groups == pytest.approx(groups)
    assert [*times.groups.values()] == sorted(times.groups.values(), reverse=True)


def test_a_collection_of_garbage_is_no_cost_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes at some allocation, which may be a sample's. Beside torch's modules it takes 0.1 s."""
    sampler = Sampler()
    monkeypatch.setattr(sampling, "take_sample", lambda: True)
    for collects in (True, False):
        monkeypatch.setattr(sampler, "sample", gc.collect if collects else lambda: sum(range(100_000)))
        before_s, begin_s = sampler.cost_s, time.thread_time()
        sampler._sample_in_main(0, None)
        took_s = time.thread_time() - begin_s
        assert (sampler.cost_s - before_s < took_s / 2) == collects


def watch(script: slow_lines.SlowLine) -> Report:
    Path("script.py").write_text(script.text)
    assert main(["watch", "--json", "r.json", "script.py"]) == 3
    return Report.from_json(Path("r.json").read_text())


def assert_named(report: Report, script: slow_lines.SlowLine) -> None:
    times = report.lines
    assert times is not None, script.title
    assert (f"script.py:{script.line}", script.part) in [(line.place, line.part) for line in times.lines], times
    assert times.is_of_workers == (script.num_workers > 0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("number", range(2))
def test_the_slow_line_is_named(
    number: int, rng: random.Random, in_place: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among the lines at least: on a busy machine a few samples do not tell which costs most."""
    script = slow_lines.draw(rng)
    report = watch(script)
    assert_named(report, script)
    assert f"script.py:{script.line}" in capsys.readouterr().err


@pytest.mark.prove
@pytest.mark.parametrize("number", range(20))
def test_the_slow_line_is_named_and_the_script_runs_as_ever(number: int, rng: random.Random, tmp_path: Path) -> None:
    """Over so many batches that the samples are some dozens also on a fast machine, which is done with one in 3 ms."""
    script = slow_lines.draw(rng, may_spawn=True, num_batches=400)
    (tmp_path / "script.py").write_text(script.text)
    environment = {**os.environ, "PYTHONPATH": PATH}
    alone, watched = (
        subprocess.run(
            [sys.executable, *more, "script.py"], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        for more in ([], ["-m", "loaderkit", "watch", "--json", "r.json"])
    )
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout), watched.stderr
    assert watched.stderr.startswith(alone.stderr)
    report = Report.from_json((tmp_path / "r.json").read_text())
    assert_named(report, script)
    assert report.lines is not None
    first = report.lines.lines[0]
    assert (first.place, first.percent > 60) == (f"script.py:{script.line}", True), (script.title, report.lines)
    assert report.lines.cost_percent < 1, (script.title, report.lines.cost_percent)


@pytest.fixture
def in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own; what a script changes is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


WORKERS = """
import threading, torch
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor([index, NUMBER, threading.active_count()])

def init(worker):
    global NUMBER
    NUMBER = 10 + worker

loader = DataLoader(Numbers(), batch_size=2, num_workers=2, worker_init_fn=init)
for batch in loader:
    print(batch.tolist())
print(loader.worker_init_fn is init)
"""


def test_a_workers_own_beginning_is_kept(in_place: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The script's `worker_init_fn` is called, and no thread more is counted than without."""
    Path("train.py").write_text(WORKERS)
    assert main(["watch", "train.py"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["[[0, 10, 1], [1, 10, 1]]", "[[2, 11, 1], [3, 11, 1]]"]
    assert out[2] == "True"


def test_a_line_is_shown_as_it_is(in_place: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever stands in it is no markup, on the page and in the terminal."""
    nasty = "values = [*range(9000)], '<script>alert(1)</script>[bold red]'"
    Path("script.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader\nclass Some:\n    def __len__(self):\n        return 60\n"
        f"    def __getitem__(self, index):\n        for _ in range(30):\n            {nasty}\n        return index\n"
        "for batch in DataLoader(Some(), batch_size=10):\n    pass\n"
    )
    assert main(["watch", "--json", "r.json", "--html", "r.html", "script.py"]) == 0
    report = Report.from_json(Path("r.json").read_text())
    assert report.lines is not None
    assert nasty in [line.source for line in report.lines.lines]
    assert "<script>alert(1)" not in Path("r.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;[bold red]" in to_html(report)
    assert "[bold red]" in to_text(report, width=200)
    capsys.readouterr()


# ---------------------------------------------------------------------------------------------- waking up to sample


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """The threads that sampled. A signal to the main thread lets it sample."""
    found: list[int] = []
    before = signal.signal(signal.SIGURG, lambda *_: found.append(threading.get_ident()) if take_sample() else None)
    yield found
    signal.signal(signal.SIGURG, before)


def begin_waiting(found: list[bool], sleep_s: float = 0.0) -> threading.Thread:
    main_thread = threading.main_thread()
    assert main_thread.ident is not None
    file = os.open(f"/proc/self/task/{main_thread.native_id}/stat", os.O_RDONLY)

    def wait() -> None:
        found.append(wait_to_sample(sleep_s, main_thread.ident or 0, file, signal.SIGURG))
        os.close(file)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_the_main_thread_samples_itself_while_it_computes(seen: list[int]) -> None:
    """It holds the GIL, and lets it go of its own only every 5 ms: another thread would be late."""
    before, found = sys.getswitchinterval(), list[bool]()
    sys.setswitchinterval(60.0)
    try:
        thread = begin_waiting(found, 0.1)  # until then this one has the GIL
        for _ in range(10**9):
            if seen or found:
                break
    finally:
        sys.setswitchinterval(before)
    thread.join()
    assert (seen, found) == ([threading.main_thread().ident], [False])


def test_a_handler_that_the_script_sets_later_gets_no_more_than_a_signal_on_its_way() -> None:
    """Nor is it taken away at the end."""
    before, got = signal.getsignal(signal.SIGURG), list[int]()
    sampler = Sampler()
    sampler.begin()
    try:
        handler = signal.signal(signal.SIGURG, lambda number, _: got.append(number))
        assert handler == sampler._sample_in_main
        seen, cost_s = 0, sampler.cost_s
        while seen < 12:
            if sampler.cost_s != cost_s:
                seen, cost_s = seen + 1, sampler.cost_s
        sampler.end()
        assert signal.getsignal(signal.SIGURG) is not signal.SIG_DFL
    finally:
        sampler.is_over = True
        signal.signal(signal.SIGURG, before)
    assert len(got) <= 1


def test_the_thread_samples_while_the_main_one_sleeps(seen: list[int]) -> None:
    found: list[bool] = []
    begin_waiting(found).join()
    assert (len(seen), found[0]) in {(0, True), (1, False)}  # one of them samples, and one alone


def test_a_sleep_is_short() -> None:
    with pytest.raises(ValueError, match="shorter than 1 s"):
        wait_to_sample(1.0, 0, 0, 0)


def test_an_instruction_without_a_line_is_its_functions() -> None:
    """As of the cleanup behind a `with`: its report was lost, as no line could be looked up."""
    fetch: Any = SimpleNamespace(f_code=_MapDatasetFetcher.fetch.__code__, f_lineno=None, f_back=None)
    own: Any = SimpleNamespace(f_code=slow_lines.draw.__code__, f_lineno=None, f_back=fetch)
    place = place_of(own)
    assert place is not None
    assert (place.line, place.fetch_line) == (own.f_code.co_firstlineno, fetch.f_code.co_firstlineno)
