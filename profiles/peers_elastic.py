"""Save at one number of ranks, resume at another: loaderkit and its peers through the same matrix, each in its own environment.

python -m profiles.peers_elastic [--only grain,mosaic] [--pairs 1-2,4-1] [--python NAME=PYTHON] [--out profiles/results]

Environments are those of `python -m profiles.peers.environments`. docs/elastic.md has the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from profiles.peers.elastic.matrix import SCENARIOS, WORLD_SIZES
from profiles.peers.environments import ROOT, python_of
from profiles.record import record

PEERS = {
    "loaderkit": "ours",
    "torchdata": "stateful",
    "mosaic": "mosaic",
    "litdata": "litdata",
    "grain": "grain",
    "energon": "energon",
}
OF_OURS = {"loaderkit", "torchdata"}  # which the interpreter that runs this has
PAIRS = [f"{before}-{after}" for before, after in product(WORLD_SIZES, WORLD_SIZES)]
# A job for a pair is set up with lcm(a, b) workers in all, each a process.
PAIRS_OF = {"energon": ["1-1", "1-2", "2-1", "2-2", "2-4", "3-2", "4-1", "4-2", "4-4"]}


def run(name: str, python: Path, pairs: list[str], scenarios: list[str], folder: Path) -> dict[str, Any]:
    """The version of a peer and its cells."""
    command = [str(python), "-m", "profiles.peers.elastic.child", PEERS[name], str(folder / name)]
    done = subprocess.run(
        [*command, ",".join(pairs), ",".join(scenarios)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if not lines:
        return {"not_run": (done.stderr.splitlines() or ["it did not start"])[-1], "cells": []}
    return {**lines[0], "cells": lines[1:], "exit_code": done.returncode}


def outcome(cell: dict[str, Any]) -> str:
    """One cell in words."""
    if "not_offered" in cell:
        return "not offered"
    if "error" in cell:
        return f"{cell['where']}: {cell['error']}"
    if "is_same" not in cell:
        share = cell["share_of_first_source"]
        return f"{cell['num_again']} of {cell['num_delivered']} came again, first source {share:.2f}"
    if cell["is_same"]:
        return "the same batches"
    same = f"{cell['num_same_steps']} of {cell['num_steps']} steps the same"
    return f"{same}, {cell['num_missing']} of {cell['num_wanted']} missing, {cell['num_again']} again"


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: by peer, scenario and outcome the pairs of world sizes."""
    lines = ["| | scenario | outcome | pairs |", "|---|---|---|---|"]
    for name, peer in found.items():
        if "not_run" in peer:
            lines.append(f"| {name} | | not run: {peer['not_run']} | |")
        for scenario in dict.fromkeys(cell["scenario"] for cell in peer["cells"]):
            cells = [cell for cell in peer["cells"] if cell["scenario"] == scenario]
            for text, number in Counter(map(outcome, cells)).items():
                pairs = [f"{cell['before']}-{cell['after']}" for cell in cells if outcome(cell) == text]
                shown = f"all {number}" if number == len(cells) else ", ".join(pairs)
                lines.append(f"| {name} {peer['version']} | {scenario} | {text.replace('|', '/')} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PEERS))
    parser.add_argument("--pairs", help="default: all 49 of 1, 2, 3, 4, 5, 8 and 16 ranks, and a few of Energon's")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PYTHON", help="instead of .peers/NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pythons = dict(given.split("=", 1) for given in args.python)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in args.only.split(","):
            python = Path(pythons.get(name) or (sys.executable if name in OF_OURS else python_of(name)))
            if not python.exists():
                found[name] = {"not_run": f"there is no {python}", "cells": []}
                continue
            pairs = args.pairs.split(",") if args.pairs else PAIRS_OF.get(name, PAIRS)
            found[name] = run(name, python, pairs, args.scenarios.split(","), Path(place))
            print(table({name: found[name]}), flush=True)
    record(args.out, "elastic", peers=found)


if __name__ == "__main__":
    main()
