"""Measure loaderkit and its peers at the same work, taking turns. See README.md in this folder.

python -m profiles.peers --work files,tar --contestants loaderkit,dali --rounds 5 --out profiles/results
python -m profiles.peers --work files,tar --contestants loaderkit --before ../earlier      this checkout against another one
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from loaderkit._internal.system.user_cache import default_cache_dir
from profiles.peers import data, report, rounds
from profiles.peers.environments import OWN, ROOT, python_of
from profiles.peers.places import Places
from profiles.peers.works import WORKS, Contestant, Work

_PEERS_FORMATS = {"litdata": "litdata", "mosaic": "mosaic"}  # part of the data: environment that writes it


def main() -> int:
    """0: everything was measured and was the same work; 1: something failed or differed; 130: stopped."""
    arguments = _parser().parse_args()
    names = list(WORKS) if arguments.work == "all" else arguments.work.split(",")
    unknown = [name for name in names if name not in WORKS]
    if unknown:
        _refuse(f"no work {', '.join(unknown)}; there are {', '.join(WORKS)}")
    pythons = dict(text.split("=", 1) for text in arguments.python)
    settings = rounds.Settings(
        root=arguments.data,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        python_of=lambda name: Path(pythons[name]) if name in pythons else python_of(name),
        say=partial(print, flush=True),
    )
    chosen = {name: _chosen(WORKS[name], arguments) for name in names}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the workers are killed on the way out
    return _measure(chosen, arguments, settings)


def _measure(chosen: dict[str, list[Contestant]], arguments: argparse.Namespace, settings: rounds.Settings) -> int:
    is_well = True
    for name, contestants in chosen.items():
        if not contestants:
            continue
        work = WORKS[name]
        if arguments.tiny:
            work = shortened(work)
        prepare(work, contestants, arguments.demo, settings, tiny=arguments.tiny)
        try:
            entries = rounds.run(work, contestants, settings)
        except KeyboardInterrupt:
            print("stopped; what was measured before is written", file=sys.stderr)
            return 130
        for entry in entries:
            is_well = is_well and entry.error is None and not entry.off
            for what in entry.off:
                print(f"{name}: {entry.contestant.name} did not do the same work: {what}", file=sys.stderr)
        command = shlex.join(["python", "-m", "profiles.peers", *sys.argv[1:]])
        table = report.write(arguments.out, command, {name: report.work_report(work, entries)})
        print(f"written to {table}", flush=True)
    return 0 if is_well else 1


def shortened(work: Work) -> Work:
    """The same with hardly any warming up: to see that it works."""
    return replace(work, skip=2, warm=1, least=1)


def prepare(
    work: Work, contestants: Sequence[Contestant], demo: Path, settings: rounds.Settings, *, tiny: bool
) -> None:
    """The work's data, in every format its contestants need, made and read once."""
    places = Places(settings.root)
    wanted = [part for part in work.parts if part not in _PEERS_FORMATS or part in {c.environment for c in contestants}]
    data.make(wanted, places, data.TINY if tiny else data.Amounts(), demo)
    for part in _PEERS_FORMATS.keys() & set(wanted):
        command: list[Path | str] = [
            settings.python_of(_PEERS_FORMATS[part]),
            "-m",
            "profiles.peers.convert",
            part,
            places.root,
        ]
        try:
            data.once(places.root / part, partial(_run, command))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{part} has no data and will fail: {error}", file=sys.stderr)
    data.into_page_cache(places.root / part for part in wanted if (places.root / part).exists())


def _run(command: Sequence[Path | str], target: Path) -> None:
    subprocess.run([*command, target], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def _chosen(work: Work, arguments: argparse.Namespace) -> list[Contestant]:
    """Those that were named, or all that are not optional; and the variants of loaderkit that were defined."""
    extra = [_variant(text) for text in arguments.also]
    if arguments.before is not None:
        extra.append(Contestant("loaderkit-before", OWN, "ours", tree=str(arguments.before.resolve())))
    if arguments.contestants is None:
        return [*(one for one in work.contestants if not one.optional), *extra]
    wanted = arguments.contestants.split(",")
    return [*(one for one in work.contestants if one.name in wanted), *extra]


def _variant(text: str) -> Contestant:
    """NAME:KEY=VALUE,KEY=VALUE: loaderkit with other settings; values are JSON, or text."""
    name, _, pairs = text.partition(":")
    settings: dict[str, Any] = {}
    for pair in pairs.split(",") if pairs else []:
        key, _, value = pair.partition("=")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return Contestant(name, OWN, "ours", settings)


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="all", help=f"all, or some of {','.join(WORKS)}")
    parser.add_argument("--contestants", help="only those named, in every work; default: all that are not optional")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME:KEY=VALUE,...",
        help="loaderkit with other settings, as one more contestant: loaderkit-8:prefetch.batches=8",
    )
    parser.add_argument(
        "--before", type=Path, metavar="FOLDER", help="another checkout of loaderkit, as one more contestant"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="the least a turn takes behind its first batches")
    parser.add_argument("--out", type=Path, default=ROOT / "profiles" / "results", help="where the results go")
    parser.add_argument("--data", type=Path, default=default_cache_dir() / "peers", help="where the data is or is made")
    parser.add_argument(
        "--demo", type=Path, default=default_cache_dir() / "demo", help="where loaderkit's demo data is"
    )
    parser.add_argument("--python", action="append", default=[], metavar="ENVIRONMENT=PATH", help="another interpreter")
    parser.add_argument("--tiny", action="store_true", help="little data and short warming up: to see that it works")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
