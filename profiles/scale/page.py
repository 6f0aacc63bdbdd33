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
_LINKS = (10, 100)  # Gbit/s
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


def driver(found: Found) -> str:
    rows = found["driver"]
    names = list(dict.fromkeys(row["executor"] for row in rows))
    by_size = {size: {row["executor"]: row for row in rows if row["batch_bytes"] == size} for size in _sizes(rows)}
    columns = [(names[0], "loop_s")] + [(name, key) for name in names[1:] for key in ("loop_s", "process_s")]
    columns += [(name, "raylet_s") for name in names if name == "ray"]
    titles = ["a batch of", *(f"`{name}`: {key.removesuffix('_s')}" for name, key in columns)]
    lines = [[_bytes(size), *(_seconds(row[name][key]) for name, key in columns)] for size, row in by_size.items()]
    return _table(titles, lines)


def _sizes(rows: Sequence[Found]) -> list[int]:
    return sorted({row["batch_bytes"] for row in rows})


def feeding(found: Found) -> str:
    """The largest cluster of one loop, by what limits it."""
    name = _remote(found)
    lines = []
    for what, cost_s, num_bytes, batch in WORKLOADS:
        sample_s = found["turns"]["mean_s"] if cost_s is None else cost_s
        batch_s, raylet_s = (driver_s(found, name, batch * num_bytes, key) for key in ("process_s", "raylet_s"))
        cells = [what, _seconds(sample_s), _bytes(batch * num_bytes), _seconds(batch_s)]
        cells += [f"{batch / batch_s:,.0f}", f"{batch / batch_s * sample_s:,.0f}", f"{raylet_s / batch_s:.1f}"]
        for link in _LINKS:
            rate = link * 1e9 / 8 / num_bytes
            cells.append(f"{min(rate, batch / batch_s) * sample_s:,.0f}")
        lines.append(cells)
    titles = [
        "work", "CPU time a sample", "a batch", "the trainer's process a batch", "samples/s that it can take",
        "CPUs that make those", "CPUs of Ray's process beside it",
        *(f"CPUs with a network of {link} Gbit/s" for link in _LINKS),
    ]  # fmt: skip
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
        cells += [f"{_seconds(row['cpu_s'])}, {_bytes(row['held_bytes'])}" for row in rows]
        cells += [f"{_seconds(largest['cpu_s'] * factor)}, {_bytes(int(largest['held_bytes'] * factor))}"]
        cells += [_bytes(int(largest["peak_bytes"] * factor))]
        lines.append(cells)
    rows = found["listings"]["array"]
    cells = ["`kind: array`", *(f"{_seconds(row['cpu_s'])}, {_little(row['held_bytes'])}" for row in rows), ""]
    lines.append(cells)
    sizes = [row["num"] for row in found["listings"]["files"]]
    titles = [
        "",
        *(f"{_power(num)} samples" for num in sizes),
        f"{_power(TARGET)}",
        f"most memory on the way, {_power(TARGET)}",
    ]
    return _table(titles, lines)


def listing_words(found: Found) -> str:
    scan = found["listings"]["scan"][0]
    pages, target = TARGET // PAGE_KEYS, _power(TARGET)
    largest, state = found["listings"]["files"][-1], found["listings"]["array"][-1]
    return "\n".join((
        f"- The columns up to {_power(largest['num'])} are measured, as is all of the row `array` (a sparse file). "
        f"{target} of the others is computed: so many times what the largest one took.",
        f"- A bucket lists {PAGE_KEYS:,} keys an answer, one answer after the other: {pages:,} requests for {target} "
        f"objects. At {_seconds(PAGE_S)} each, which is assumed, that is {_seconds(pages * PAGE_S)} before the "
        "first batch.",
        f"- An index of a shard is made at {_seconds(scan['scan_s'])} of CPU time a sample of two files, besides reading "
        f"the shard, and read from its copy at {_seconds(scan['copy_s'])}; a copy takes {scan['copy_bytes']:.0f} bytes a "
        f"sample ({_bytes(int(scan['copy_bytes'] * TARGET))} for {target}).",
        f"- A state takes {state['state_bytes']} bytes and {_seconds(state['state_s'])}, whatever the number of samples.",
    ))  # fmt: skip


def order(found: Found) -> str:
    lines = [
        [_power(row["num"]), _seconds(row["cpu_s"]), f"{1e9 * row['cpu_s'] / 256:.0f} ns"]
        for row in found["listings"]["order"]
    ]
    return _table(["samples of an epoch", "where 256 positions lead", "one"], lines)


def blocks(found: Found) -> str:
    lines = [
        [
            _power(row["num"]),
            f"{_bytes(row['num'] * 2**23)}",
            _seconds(row["layout_s"]),
            _bytes(row["held_bytes"]),
            _bytes(row["peak_bytes"]),
            _seconds(row["cpu_s"]),
        ]
        for row in found["listings"]["blocks"]
    ]
    titles = [
        "blocks", "data, at 8 MiB a block", "laid out at an epoch's begin", "memory", "most on the way", "256 positions then",
    ]  # fmt: skip
    return _table(titles, lines)


# ------------------------------------------------------------------------------------------------------- requests


def requests(found: Found) -> str:
    lines = []
    for row in found["requests"]:
        epoch = row["epoch"]
        num = epoch["get"] + epoch.get("head", 0)
        each = num / epoch["num_samples"]
        name = row["what"] + (f", {row['ranks']} ranks" if row["ranks"] > 1 else "")
        wanted = found["sample_bytes"] * epoch["num_samples"]
        lines.append([
            name, f"{epoch['get'] / epoch['num_samples']:.3f}", f"{epoch.get('head', 0) / epoch['num_samples']:.3f}",
            f"{epoch['range_bytes'] / wanted:.2f}", f"{RANKS * RATE * each:,.0f}",
        ])  # fmt: skip
    titles = [
        "", "GET a sample", "HEAD a sample", "bytes asked / bytes of samples",
        f"requests/s of {RANKS:,} ranks, {RATE} samples/s each",
    ]  # fmt: skip
    return _table(titles, lines)


def starts(found: Found) -> str:
    lines = []
    for row in found["requests"]:
        if row["what"] != "files" and "global" not in row["what"]:
            continue
        cells = [row["what"].removesuffix(", global")]
        for start in (row["start"], row["start_again"]):
            num = sum(start.get(kind, 0) for kind in ("list", "head", "get"))
            cells += [str(num), _bytes(start.get("range_bytes", 0)), f"{num * RANKS:,}"]
        lines.append(cells)
    titles = ["", "requests", "bytes", f"of {RANKS:,} nodes"]
    return _table([titles[0], *titles[1:], *(f"{title}, indexes kept" for title in titles[1:])], lines)


def starts_words(found: Found) -> str:
    row = next(row for row in found["requests"] if row["what"] == INDEXED)
    each = sum(row["start"].get(kind, 0) for kind in ("head", "get")) / SHARDS[-1]
    num_bytes = TARGET * found["sample_bytes"]
    shards = {size: -(-num_bytes // size) for size in (256 * 10**6, 10**9)}
    text = ", ".join(
        f"in shards of {_bytes(size)} {num:,} shards and {each * num:,.0f} requests" for size, num in shards.items()
    )
    return (
        f"With an `.idx` beside it a shard takes {each:.0f} requests at the first start of a node, whatever its size: it is "
        f"checked against the shard. {_power(TARGET)} samples of {_bytes(found['sample_bytes'])} are {_bytes(num_bytes)}: "
        f"{text}, of every node."
    )


# ---------------------------------------------------------------------------------------------------------- turns


def turns(found: Found) -> str:
    lines = [
        [row["kind"], str(row["workers"]), *(f"{100 * row[str(depth)]:.0f} %" for depth in DEPTHS)]
        for row in found["turns"]["rows"]
    ]
    titles = [
        "times of batches",
        "workers",
        *(f"{depth} {'batch' if depth == 1 else 'batches'} each" for depth in DEPTHS),
    ]
    return _table(titles, lines)


def turns_words(found: Found) -> str:
    measured = found["turns"]
    rows = {(row["kind"], row["workers"]): row for row in measured["rows"]}
    slow = next(kind for kind, _ in rows if "of the speed" in kind)
    most = rows[slow, WORKERS[-1]][str(DEPTHS[-1])]
    return (
        f"In work and ahead are so many batches a worker. The pictures' times are those of {measured['num']} samples on this "
        f"machine: {_seconds(measured['mean_s'])} in the mean, {_seconds(measured['p99_s'])} for one in a hundred, "
        f"{_seconds(measured['most_s'])} at most. The other kinds are made up on top of them. With "
        f"{slow.partition(', ')[2]}, {100 * most:.0f} % of the capacity comes out, however many batches are ahead."
    )


def machine(found: Found) -> str:
    return (
        f"Measured with {found['cpus']} CPUs ({found['machine']}), Python {found['python']}, beside other programs; CPU time, "
        "which those hardly change. The tables and figures are written by `python -m profiles.scale`; "
        f"[what was measured](../profiles/results/{found['file']})."
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
    "machine": machine, "driver": driver, "feeding": feeding, "listing": listing, "listing-words": listing_words,
    "order": order, "blocks": blocks, "requests": requests, "starts": starts, "starts-words": starts_words,
    "turns": turns, "turns-words": turns_words,
}  # fmt: skip
