"""The tables and sentences of docs/scale.md, from the newest measurement: what is measured, and what is computed from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loaderkit._internal.units import say_seconds
from profiles.scale.listings import TARGET
from profiles.scale.requests import INDEXED, SHARDS
from profiles.scale.turns import BATCH, DEPTHS, WORKERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "profiles" / "results"
RANKS, RATE = 10_000, 100  # ranks, and samples/s that each takes
PAGE_S, PAGE_KEYS = 0.05, 1000  # of a listing: assumed answer time, and keys in one answer by S3's protocol
LINK = 10  # Gbit/s, of the trainer's node
_SHOWN_WORKERS = WORKERS[1]
_UNINDEXED = INDEXED.replace(" with .idx", "")
# Of the orders whose requests were counted those that the page shows.
_ORDERS = {
    "files": "files",
    "tar, 16 shards, global": "tar, `global`",
    "tar, 16 shards, none": "tar, `none`",
    "tar, 16 shards, block 8MiB": "tar, `block` of 8 MiB",
}
_BLOCK = re.compile(r"<!-- scale: ([\w-]+) -->\n.*?<!-- end -->\n", re.DOTALL)
Found = Mapping[str, Any]

# What a sample costs, in CPU seconds (None: as measured), its bytes in the batch, and samples of a batch.
WORKLOADS: tuple[tuple[str, float | None, int, int], ...] = (
    ("pictures, float32, 224 x 224", None, 4 * 3 * 224 * 224, BATCH),
    ("pictures, uint8, 224 x 224", None, 3 * 224 * 224, BATCH),
    ("10 ms a sample, of 200 kB", 0.01, 200_000, BATCH),
    ("100 ms a sample, of 2 MB", 0.1, 2_000_000, 16),
    ("0.1 ms a sample, of 16 kB", 1e-4, 16_000, BATCH),
)


def newest(folder: Path = RESULTS) -> Found:
    """What was measured last; nothing where nothing was."""
    files = sorted(folder.glob("scale-*.json"), key=lambda path: path.stem[-10:])
    found: dict[str, Any] = json.loads(files[-1].read_text()) if files else {}
    return found


def filled(page: str, found: Found | None = None) -> str:
    """The page with every block as the measurement says it."""
    known = newest() if found is None else found
    return _BLOCK.sub(lambda match: f"<!-- scale: {match[1]} -->\n{BLOCKS[match[1]](known)}\n<!-- end -->\n", page)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, ["---"] * len(titles), *rows))


# ----------------------------------------------------------------------------------------------------- the driver


def feeding(found: Found) -> str:
    """The largest cluster of one loop, by what limits it."""
    name = _remote(found)
    lines = []
    for what, cost_s, num_bytes, batch in WORKLOADS:
        sample_s = found["turns"]["mean_s"] if cost_s is None else cost_s
        batch_s, raylet_s = (driver_s(found, name, batch * num_bytes, key) for key in ("process_s", "raylet_s"))
        rate = LINK * 1e9 / 8 / num_bytes
        cells = [what, _seconds(sample_s), _bytes(batch * num_bytes), f"{batch / batch_s * sample_s:,.0f}"]
        cells += [f"{min(rate, batch / batch_s) * sample_s:,.0f}", f"{raylet_s / batch_s:.1f}"]
        lines.append(cells)
    titles = ["work", "a sample", "a batch", "CPUs it can take", f"at {LINK} Gbit/s", "CPUs of Ray's process"]
    return _table(titles, lines)


def _remote(found: Found) -> str:
    """The executor with workers elsewhere whose costs count: the last one that was measured."""
    return str(found["driver"][-1]["executor"])


def driver_s(found: Found, name: str, num_bytes: int, key: str = "process_s") -> float:
    """CPU seconds of the trainer's process a batch, or of another one that was measured: between the sizes that were measured
    a line, beyond them its last slope."""
    rows = sorted((row["batch_bytes"], row[key]) for row in found["driver"] if row["executor"] == name)
    sizes, seconds = np.array(rows).T
    if num_bytes <= sizes[-1]:
        return float(np.interp(num_bytes, sizes, seconds))
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
    return float(seconds[-1] + slope * (num_bytes - sizes[-1]))


# ---------------------------------------------------------------------------------------------- listing and index


def listing(found: Found) -> str:
    lines = []
    for kind in ("files", "tar"):
        rows = found["listings"][kind]
        largest = rows[-1]
        factor = TARGET / largest["num"]
        cells = [f"`kind: {kind}`"]
        cells += [f"{_seconds(largest['cpu_s'])}, {_bytes(largest['held_bytes'])}"]
        cells += [f"{_seconds(largest['cpu_s'] * factor)}, {_bytes(int(largest['held_bytes'] * factor))}"]
        lines.append(cells)
    rows = found["listings"]["array"]
    cells = ["`kind: array`", *(f"{_seconds(row['cpu_s'])}, {_little(row['held_bytes'])}" for row in rows[-2:])]
    lines.append(cells)
    titles = ["", f"{_power(found['listings']['files'][-1]['num'])} samples", _power(TARGET)]
    return _table(titles, lines)


def listing_words(found: Found) -> str:
    scan = found["listings"]["scan"][0]
    pages, target = TARGET // PAGE_KEYS, _power(TARGET)
    largest = found["listings"]["files"][-1]
    return "\n".join((
        f"- {target} is computed from {_power(largest['num'])}, but measured for `array`. While it lists, `files` takes "
        f"{largest['peak_bytes'] / largest['held_bytes']:.1f} times the memory.",
        f"- A bucket lists {PAGE_KEYS:,} keys an answer: {pages:,} requests for {target} objects, "
        f"{_seconds(pages * PAGE_S)} at {_seconds(PAGE_S)} each.",
        f"- The index of a shard takes {_seconds(scan['scan_s'])} a sample to make, {_seconds(scan['copy_s'])} to read, and "
        f"{scan['copy_bytes']:.0f} bytes.",
    ))  # fmt: skip


# ------------------------------------------------------------------------------------------------------- requests


def requests(found: Found) -> str:
    lines = []
    for row in found["requests"]:
        if row["what"] not in _ORDERS or row["ranks"] > 1:
            continue
        epoch = row["epoch"]
        each = (epoch["get"] + epoch.get("head", 0)) / epoch["num_samples"]
        lines.append([_ORDERS[row["what"]], f"{each:.3f}", f"{RANKS * RATE * each:,.0f}"])
    return _table(["", "requests a sample", f"requests/s of {RANKS:,} ranks, {RATE} samples/s each"], lines)


def starts(found: Found) -> str:
    rows = {row["what"]: row for row in found["requests"]}
    said = []
    for what, name in ((_UNINDEXED, "it"), (INDEXED, "with `.idx` files it")):
        start = rows[what]["start"]
        num = sum(start.get(kind, 0) for kind in ("list", "head", "get"))
        said.append(f"{name} makes {num} requests for {_bytes(start['range_bytes'])}")
    return f"At the first start of a node, for {SHARDS[-1]} shards, {'; '.join(said)}. Later it makes 1."


# ---------------------------------------------------------------------------------------------------------- turns


def turns(found: Found) -> str:
    lines = [
        [row["kind"], *(f"{100 * row[str(depth)]:.0f} %" for depth in DEPTHS)]
        for row in found["turns"]["rows"]
        if row["workers"] == _SHOWN_WORKERS
    ]
    titles = ["times of batches", *(f"{depth} each" for depth in DEPTHS)]
    return _table(titles, lines)


def machine(found: Found) -> str:
    return (
        f"Measured with {found['cpus']} CPUs ({found['machine']}), Python {found['python']}, beside other programs, "
        "as CPU time. "
        f"`python -m profiles.scale` writes the tables from [what was measured](../profiles/results/{found['file']})."
    )


def _bytes(num_bytes: float) -> str:
    """In three digits, by powers of 1,000."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _seconds(seconds: float) -> str:
    """The same, from minutes on by the words one uses."""
    if seconds >= 5400:
        return f"{seconds / 3600:.2g} hours"
    return f"{seconds / 60:.2g} minutes" if seconds >= 90 else say_seconds(seconds)


def _little(num_bytes: float) -> str:
    return "under 4 MB" if num_bytes < 4e6 else _bytes(int(num_bytes))


def _power(num: int) -> str:
    digits = len(str(num)) - 1
    return f"10^{digits}" if num == 10**digits else f"{num:,}"


BLOCKS: Mapping[str, Callable[[Found], str]] = {
    "machine": machine, "feeding": feeding, "listing": listing, "listing-words": listing_words, "requests": requests,
    "starts": starts, "turns": turns,
}  # fmt: skip
