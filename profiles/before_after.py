"""Two checkouts of loaderkit in turns: what a change costs or brings, by the works that must not become slower.

    python -m profiles.before_after ../before [--after ../after] [--work files,restore-cold] [--out profiles/results]

Both checkouts need their own C modules, built in place, or one of them is measured with its fallback:

    cd ../before && python -c "from setuptools import setup; setup()" build_ext --inplace

Each checkout runs its own package and its own workers of `profiles.peers`; restores use `loaderkit.restore` alone. A ratio is
of two turns of one round, above 1 where the checkout after is faster; its median is held against the work's bar.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch

from loaderkit._internal.system.cgroups import num_cpus
from loaderkit._internal.system.user_cache import default_cache_dir
from profiles.peers import rounds
from profiles.peers.__main__ import prepare, shortened
from profiles.peers.environments import OWN, ROOT
from profiles.peers.places import WINDOW, Places
from profiles.peers.report import number, spread
from profiles.peers.works import WORKS, Contestant
from profiles.record import record
from profiles.restore import bucket, drop, make_state

_BAR = 0.97


@dataclass(frozen=True)
class Comparison:
    """A ratio that is judged: of `work`, with `settings`; `against` a peer's contestant, or the checkout before."""

    work: str
    settings: tuple[tuple[str, Any], ...] = ()
    against: str | None = None
    bar: float = _BAR

    @property
    def title(self) -> str:
        return f"{self.work}, against {self.against}" if self.against else self.work


_UNSHUFFLED = (("order.shuffle", "none"),)
_INLINE = (("prefetch.executor", "inline"),)
COMPARISONS = (
    Comparison("files"),
    Comparison("tar"),
    Comparison("raw-tar", _UNSHUFFLED),
    Comparison("raw-tar-first", _UNSHUFFLED),
    Comparison("large-npy"),
    Comparison("large-npz"),
    Comparison("tokens"),
    Comparison("dataset", _INLINE, "dataloader-in-process", 0.7),
    Comparison("records", (), "dataloader", 5.0),
)
DEFAULTS = ("tokens", "raw-tar", "records")
"""Works that are also measured as a pipeline without `prefetch` runs: the peers' contestants have two threads."""
RESTORES = {"restore-warm": 8, "restore-cold": 1, "restore-s3": 1}
"""How often a turn restores: enough to outlast the clock's noise."""

_RESTORER = """
import sys, time, torch, loaderkit
url, num_times = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
into = loaderkit.restore(url)
print(loaderkit.__file__, flush=True)
for _ in sys.stdin:
    begin_s = time.perf_counter()
    for _ in range(num_times):
        loaderkit.restore(url, into)
    print((time.perf_counter() - begin_s) / num_times, flush=True)
"""

_ITERATOR = """
import itertools, json, sys, time, loaderkit
pipeline, size, seconds = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
print(loaderkit.__file__, flush=True)
with loaderkit.build(pipeline) as loader:
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for _ in range(200):
        next(batches)
    for _ in sys.stdin:
        begin_s, num_batches = time.perf_counter(), 0
        while time.perf_counter() - begin_s < seconds:
            for _ in range(20):
                next(batches)
            num_batches += 20
        print(num_batches * size / (time.perf_counter() - begin_s), flush=True)
"""


def compare_defaults(name: str, before: Path, after: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the table: the work's batches in order, in samples/s, by a pipeline that says nothing of `prefetch`."""
    places, work = Places(options.data), WORKS[name]
    source, size = {
        "tokens": ({"kind": "array", "url": str(places.tokens), "dtype": "uint16", "window": WINDOW}, 16),
        "raw-tar": ({"kind": "tar", "url": str(places.small_shards)}, 64),
        "records": ({"kind": "array", "url": str(places.records)}, 64),
    }[name]
    pipeline = {
        "source": source,
        "order": {"shuffle": "none" if name == "raw-tar" else "global"},
        "stages": ["read", {"batch": {"size": size, "drop_last": True}}],
    }
    arguments = (json.dumps(pipeline), str(size), str(options.seconds))
    with ExitStack() as stack:
        turns = {
            "before": stack.enter_context(turns_of(before, _ITERATOR, *arguments)),
            "after": stack.enter_context(turns_of(after, _ITERATOR, *arguments)),
        }
        rates = in_turns(f"{name}, default", turns, options.rounds, lambda turn: turn())
    return _compared(f"{name}, default settings", work.unit, rates)


def in_turns(
    title: str, turns: dict[str, Callable[[], float]], num_rounds: int, rate_of: Callable[[Callable[[], float]], float]
) -> dict[str, list[float]]:
    """The rates of both checkouts, which begin a round by turns."""
    rates: dict[str, list[float]] = {"before": [], "after": []}
    for turn_number in range(num_rounds):
        for side in sorted(turns, reverse=turn_number % 2 == 0):
            rates[side].append(rate_of(turns[side]))
            print(f"{title:<22} round {turn_number + 1}: {side:<24} {rates[side][-1]:12.2f}", flush=True)
    return rates


def compare(comparison: Comparison, before: Path, after: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the table, measured by the harness of the peers."""
    work = shortened(WORKS[comparison.work]) if options.tiny else WORKS[comparison.work]
    ours = [
        Contestant(name, OWN, "ours", dict(comparison.settings), tree=str(tree))
        for name, tree in (("after", after), ("before", before))
    ]
    peers = [one for one in work.contestants if one.name == comparison.against]
    contestants = [*ours, *(Contestant(one.name, OWN, one.module, one.settings) for one in peers)]
    settings = rounds.Settings(
        root=options.data,
        rounds=options.rounds,
        seconds=options.seconds,
        python_of=lambda _: Path(sys.executable),
        say=partial(print, flush=True),
    )
    prepare(work, contestants, options.demo, settings, tiny=options.tiny)
    entries = {entry.contestant.name: entry for entry in rounds.run(work, contestants, settings)}
    for entry in entries.values():
        if entry.error is not None or entry.off:
            raise SystemExit(f"{work.name}, {entry.contestant.name}: {entry.error or entry.off}")
    figures = {
        name: statistics.median(rounds.value_of(work, turn) for turn in entry.turns.values())
        for name, entry in entries.items()
    }
    ratios = rounds.ratios(work, entries["before"], entries["after"])
    judged = rounds.ratios(work, entries[comparison.against], entries["after"]) if comparison.against else ratios
    return _row(comparison.title, work.unit, figures, ratios, judged=judged, bar=comparison.bar)


def compare_restores(name: str, before: Path, after: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the table: a safetensors file into tensors that exist, in GB/s."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
        file = Path(folder) / "plain" / "model.safetensors"
        file.parent.mkdir()
        state = make_state(options.gigabytes, tiny=False)
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        safetensors.torch.save_file(state, file)
        del state
        url = str(file)
        if name == "restore-s3":
            endpoint, _ = bucket({"plain": file.parent}, Path(folder), stack)
            os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
            url = "s3://restore/plain/model.safetensors"
        turns = {
            "before": stack.enter_context(turns_of(before, _RESTORER, url, str(RESTORES[name]))),
            "after": stack.enter_context(turns_of(after, _RESTORER, url, str(RESTORES[name]))),
        }

        def restored(turn: Callable[[], float]) -> float:
            if name == "restore-cold":
                drop(file)
            return num_bytes / turn() / 1e9

        rates = in_turns(name, turns, options.rounds, restored)
    return _compared(name, "GB/s", rates)


def _compared(title: str, unit: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [new / old for new, old in zip(rates["after"], rates["before"], strict=True)]
    figures = {side: statistics.median(rates[side]) for side in rates}
    return _row(title, unit, figures, ratios, judged=ratios, bar=_BAR)


@contextmanager
def turns_of(tree: Path, program: str, *arguments: str) -> Iterator[Callable[[], float]]:
    """A process with the package of `tree` that runs a program, ready to begin; each call has it work again and returns the
    figure that it prints. Between two of them it is stopped, with all its processes: none reads ahead in another's turn."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def turn() -> float:
        os.killpg(process.pid, signal.SIGCONT)
        requests.write("\n")
        requests.flush()
        try:
            return float(answers.readline())
        finally:
            os.killpg(process.pid, signal.SIGSTOP)

    try:
        package = Path(answers.readline().strip())
        assert package.is_relative_to(tree), f"{package} is not of {tree}"
        yield turn
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _row(
    title: str, unit: str, figures: dict[str, float], ratios: list[float], *, judged: list[float], bar: float
) -> dict[str, Any]:
    """`judged`: the ratios that are held against the bar."""
    return {
        "work": title,
        "unit": unit,
        "figures": figures,
        "ratio": rounds.summary(ratios),
        "judged": rounds.summary(judged),
        "bar": bar,
        "holds": statistics.median(judged) >= bar,
    }


def table(rows: list[dict[str, Any]], commits: dict[str, str]) -> str:
    """The rows as Markdown."""
    lines = [
        f"# Before and after: {commits['before']} and {commits['after']}",
        "",
        "Medians of the rounds, in brackets the least and the most; made by `python -m profiles.before_after`.",
        "Where a work is judged against a peer, its bar is for after / peer.",
        "",
        "| work | unit | before | after | after / before | judged | bar | holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = (number(row["figures"][side]) for side in ("before", "after"))
        spreads = f"{spread(row['ratio'])} | {spread(row['judged'])}"
        holds = "yes" if row["holds"] else "no"
        lines.append(f"| {row['work']} | {row['unit']} | {before} | {after} | {spreads} | {row['bar']} | {holds} |")
    return "\n".join(lines) + "\n"


def commit_of(tree: Path) -> str:
    """The commit that is checked out there, marked where files differ from it."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=tree, capture_output=True, text=True, check=True
    )
    return said.stdout.strip()


def main() -> int:
    """0: every bar holds; 1: one does not."""
    options = _parser().parse_args()
    names = [comparison.work for comparison in COMPARISONS] + list(RESTORES)
    wanted = names if options.work == "all" else options.work.split(",")
    if unknown := set(wanted) - set(names):
        raise SystemExit(f"no work {sorted(unknown)}; there are {', '.join(names)}")
    before, after = options.before.resolve(), options.after.resolve()
    for tree in (before, after):
        if not list((tree / "loaderkit").rglob("_kernels*.so")):
            raise SystemExit(f"{tree} has no C modules: see --help")
    commits = {"before": commit_of(before), "after": commit_of(after)}
    rows: list[dict[str, Any]] = []
    for name in wanted:
        comparison = next((one for one in COMPARISONS if one.work == name), None)
        if comparison is not None:
            rows.append(compare(comparison, before, after, options))
            if name in DEFAULTS:
                rows.append(compare_defaults(name, before, after, options))
        else:
            rows.append(compare_restores(name, before, after, options))
        if options.out is not None:  # after each work, so that what was measured stays
            record(options.out, "before-after", commits=commits, rounds=options.rounds, rows=rows)
            today = datetime.now(UTC).date().isoformat()
            (options.out / f"before-after-{num_cpus()}cpu-{today}.md").write_text(table(rows, commits))
    print(table(rows, commits))
    return 0 if all(row["holds"] for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the state before, its C modules built in place")
    parser.add_argument("--after", type=Path, default=ROOT, help="the other checkout; default: this one")
    parser.add_argument("--work", default="all", help="some of the works, with commas between them; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="the least a turn of a loader takes")
    parser.add_argument("--gigabytes", type=float, default=2, help="what is restored")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written: the disk that is measured cold")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON and Markdown")
    parser.add_argument("--data", type=Path, default=default_cache_dir() / "peers", help="where the loaders' data is")
    parser.add_argument(
        "--demo", type=Path, default=default_cache_dir() / "demo", help="where loaderkit's demo data is"
    )
    parser.add_argument("--tiny", action="store_true", help="little data and short warming up: to see that it works")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
