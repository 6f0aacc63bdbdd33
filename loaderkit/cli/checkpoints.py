"""`loaderkit checkpoints`: list the checkpoints of a run, verify and copy them, remove what is left of dead saves, advise on
saving."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit._internal.units import parse_seconds, say_age, say_size
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.byte_progress import ByteProgress, byte_progress
from loaderkit.cli.terminal.options import AsJson, Debug
from loaderkit.errors import CheckpointError, ConfigError, ConnectorError, FormatError

if TYPE_CHECKING:
    from loaderkit.checkpoint.discovery.listing import CheckpointSummary
    from loaderkit.checkpoint.save.copy import CopiedCheckpoint
    from loaderkit.checkpoint.save.prune import Debris

_FORMATS = ("dcp", "safetensors")
Url = Annotated[
    str | None,
    typer.Argument(
        metavar="URL",
        help="The directory that the checkpoints are in, or one of them; or a checkpoint.yaml that says where they are. With "
        "--advise and --params none is needed.",
        show_default=False,
    ),
]
_ADVISE = "Advise"
Params = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        rich_help_panel=_ADVISE,
        help="The number of parameters, such as 70e9; default the size of the newest checkpoint at URL.",
    ),
]
Ranks = Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=_ADVISE, help="The number of ranks.")]
RanksPerMachine = Annotated[
    int, typer.Option(min=1, metavar="N", rich_help_panel=_ADVISE, help="Of them on a machine.")
]
Store = Annotated[
    str | None,
    typer.Option(
        metavar="SPEED", rich_help_panel=_ADVISE, help="How fast all ranks together write to the store, such as 2GB/s."
    ),
]
Local = Annotated[
    str | None,
    typer.Option(metavar="SPEED", rich_help_panel=_ADVISE, help="How fast they write to `local`, if there is one."),
]
HostCopy = Annotated[
    str,
    typer.Option(metavar="SPEED", rich_help_panel=_ADVISE, help="How fast a rank copies its state to host memory."),
]
Mtbf = Annotated[
    str, typer.Option(metavar="DURATION", rich_help_panel=_ADVISE, help="The mean time between two interruptions.")
]


def checkpoints(
    url: Url = None,
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every byte of each with its manifest; fail if one differs.")
    ] = False,
    copy: Annotated[
        str | None,
        typer.Option(
            "--copy",
            metavar="TO",
            help="Copy each whole one into the directory TO, compared with its manifest on the way.",
        ),
    ] = None,
    as_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="With --copy: write them as dcp or safetensors, whatever program has made them.",
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FROM=TO",
            help="With --format: names that begin with FROM begin with TO in the copy; may be repeated.",
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what saves that died have left; shows it and asks before.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: do not ask.")] = False,
    idle: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="With --prune: after how long without a write a step that is no checkpoint is taken for dead.",
        ),
    ] = "24h",
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            rich_help_panel=_ADVISE,
            help="Say what saving takes, how often to save, what is lost, and what each lever brings.",
        ),
    ] = False,
    params: Params = None,
    ranks: Ranks = 1,
    ranks_per_machine: RanksPerMachine = 8,
    store: Store = None,
    local: Local = None,
    host_copy: HostCopy = "10GB/s",
    mtbf: Mtbf = "24h",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the checkpoints at URL: step, age, size, and whether each is whole or what is missing."""
    if verify + (copy is not None) + prune + advise > 1:
        raise typer.BadParameter("give one of --verify, --copy, --prune and --advise")
    if as_format is not None and (copy is None or as_format not in _FORMATS):
        raise typer.BadParameter(f"--format is one of {' and '.join(_FORMATS)}, and goes with --copy")
    if rename and as_format is None:
        raise typer.BadParameter("--rename goes with --copy and --format")
    if advise:
        from loaderkit.cli.terminal.advice import advise_job

        advise_job(
            (lambda: _newest_bytes(url)) if url is not None else None,
            params,
            speeds={"--store": store, "--local": local, "--host-copy": host_copy},
            mtbf=mtbf,
            ranks=ranks,
            ranks_per_machine=ranks_per_machine,
            as_json=as_json,
        )
        return
    if url is None:
        raise typer.BadParameter("give the URL of checkpoints", param_hint="URL")
    places = _places(url)
    if prune:
        _prune(places, url, _idle_seconds(idle), yes, as_json)
        return
    listed = _listed(places)
    found = [summary for summary, _ in listed]
    if copy is not None:
        _copy(found, _copier(copy, as_format, _renaming(rename or [])), copy, as_json)
        return
    now_s = time.time()
    rows = [_row(summary, now_s) | {"tier": tier} for summary, tier in listed]
    num_failed = _verify(found, rows) if verify else 0
    newest = next((summary.name for summary in reversed(found) if summary.is_whole), None)
    if as_json:
        console.tell_json({"url": url, "newest": newest, "checkpoints": rows})
    else:
        _tell(url, rows)
    if num_failed:
        raise typer.Exit(1)


def _places(url: str) -> list[tuple[str | None, str]]:
    """(tier, URL) of the directories that the checkpoints are in: `local` and `to` of a file with settings."""
    if "://" in url or not url.endswith((".yaml", ".yml")):
        return [(None, url)]
    from loaderkit.checkpoint.manager.settings import save_settings

    settings = save_settings(url)
    local = [] if settings.local is None else [("local", settings.local.path)]
    return [*local, ("to", settings.to)]


def _listed(places: list[tuple[str | None, str]]) -> list[tuple[CheckpointSummary, str | None]]:
    """The checkpoints of all places, each with its tier, the newest last. Raises CheckpointError if nothing is in any of
    them."""
    from loaderkit.checkpoint.discovery.listing import by_age, list_checkpoints

    found: list[tuple[CheckpointSummary, str | None]] = []
    missing: CheckpointError | None = None
    for tier, url in places:
        try:
            found += [(summary, tier) for summary in list_checkpoints(url)]
        except CheckpointError as error:
            missing = missing or error
    if missing is not None and not found:
        raise missing
    return found if len(places) == 1 else sorted(found, key=lambda item: by_age(item[0].name))


def _newest_bytes(url: str) -> int:
    """The size of the newest whole checkpoint."""
    sizes = [summary.num_bytes for summary, _ in _listed(_places(url)) if summary.is_whole]
    if not sizes:
        raise CheckpointError(f"{url} has no whole checkpoint to take the size from: give --params")
    return sizes[-1]


def _idle_seconds(idle: str) -> float:
    try:
        return parse_seconds(idle)
    except ValueError as error:
        raise typer.BadParameter(f"expected {error}", param_hint="--idle") from None


class _Counter:
    """Counts the bytes that are done, and of which checkpoint, for a progress bar over several."""

    def __init__(self, total: int) -> None:
        self.name = ""
        self._total, self._num_bytes = total, 0
        self._begin_s = time.perf_counter()
        self.show: Callable[[], None] = lambda: None

    def now(self) -> ByteProgress:
        return ByteProgress(self._num_bytes, self._total, time.perf_counter() - self._begin_s, self.name)

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self.show()


def _renaming(rename: list[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in rename]
    if wrong := [begin for begin, equals, _ in pairs if not equals]:
        raise typer.BadParameter(f"expected FROM=TO, not {wrong[0]!r}", param_hint="--rename")
    return {begin: here for begin, _, here in pairs}


_Copier = Callable[[str, Callable[[int], None]], "CopiedCheckpoint"]


def _copier(to: str, as_format: str | None, rename: dict[str, str]) -> _Copier:
    """A function that copies a checkpoint, given its URL and the progress."""
    if as_format is None:
        from loaderkit.checkpoint.save.copy import copy_checkpoint

        return lambda url, progress: copy_checkpoint(url, to, progress=progress)
    from loaderkit.checkpoint.manager.convert import convert_checkpoint

    kind: Any = as_format
    return lambda url, progress: convert_checkpoint(url, to, kind, rename=rename, progress=progress)


def _copy(found: list[CheckpointSummary], copier: _Copier, to: str, as_json: bool) -> None:
    by_name: dict[str, CheckpointSummary] = {}
    for summary in found:  # of a step in two directories the local one comes first
        if summary.is_whole:
            by_name.setdefault(summary.name, summary)
    whole = [*by_name.values()]
    if not whole:
        raise CheckpointError("there is no whole checkpoint to copy")
    counter = _Counter(sum(summary.num_bytes for summary in whole))
    rows: list[dict[str, Any]] = []
    with byte_progress(counter.now) as counter.show:
        for summary in whole:
            counter.name = summary.name
            row: dict[str, Any] = {
                "name": summary.name,
                "url": None,
                "num_bytes": None,
                "num_files": None,
                "status": "failed",
            }
            try:
                copied = copier(summary.url, counter.add)
                status = "was there" if copied.was_there else "copied"
                row |= {
                    "url": copied.url,
                    "num_bytes": copied.num_bytes,
                    "num_files": copied.num_files,
                    "status": status,
                }
            except (CheckpointError, ConfigError, FormatError, ConnectorError) as error:
                row["error"] = str(error)
            rows.append(row)
    for row in rows:
        if "error" in row:
            console.say(f"error: {row['error']}")
        elif not as_json:
            console.tell(f"{row['url']}: {row['status']}, {row['num_files']} files, {say_size(row['num_bytes'])}")
    if as_json:
        console.tell_json({"to": to, "checkpoints": rows})
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def _prune(places: list[tuple[str | None, str]], url: str, idle_s: float, yes: bool, as_json: bool) -> None:
    from loaderkit.checkpoint.save.prune import find_debris, remove_debris

    found: list[tuple[str, list[Debris]]] = []
    for tier, where in places:
        try:
            found.append((where, find_debris(where, idle_s=idle_s)))
        except CheckpointError:
            if tier is None:  # else it may not be there yet
                raise
    debris = [item for _, items in found for item in items]
    is_removed = False
    if not as_json:
        for item in debris:
            console.tell(f"{item.name}  {item.num_files} files, {say_size(item.num_bytes)}: {item.reason}")
        if not debris:
            console.tell(f"{url}: nothing to remove")
    if debris and (yes or (not as_json and _is_agreed(debris))):
        for where, items in found:
            remove_debris(where, items)
        is_removed = True
    if as_json:
        rows = [
            {"name": item.name, "num_bytes": item.num_bytes, "num_files": item.num_files, "reason": item.reason}
            for item in debris
        ]
        console.tell_json({"url": url, "debris": rows, "removed": is_removed})
    elif debris:
        console.tell("removed" if is_removed else "nothing was removed")


def _is_agreed(debris: list[Debris]) -> bool:
    total = say_size(sum(item.num_bytes for item in debris))
    if not sys.stdin.isatty():
        console.say(f"not removed, as there is no terminal to ask at: --yes removes these {len(debris)} ({total})")
        return False
    return typer.confirm(f"Remove these {len(debris)} ({total})?", err=True)


def _row(summary: CheckpointSummary, now_s: float) -> dict[str, Any]:
    return {
        "name": summary.name,
        "url": summary.url,
        "step": summary.step,
        "time_s": summary.time_s,
        "age_s": None if summary.time_s is None else max(0.0, now_s - summary.time_s),
        "num_bytes": summary.num_bytes,
        "num_files": summary.num_files,
        "format": summary.format or None,
        "has_manifest": summary.has_manifest,
        "is_whole": summary.is_whole,
        "problem": summary.problem or None,
    }


def _verify(found: list[CheckpointSummary], rows: list[dict[str, Any]]) -> int:
    """Add `verified` and `damage` to the rows; returns the number of checkpoints that failed.

    A checkpoint that was never committed is no failure: it may be being written.
    """
    from loaderkit.checkpoint.discovery.verify import verify_checkpoint

    counter = _Counter(sum(summary.num_bytes for summary in found if summary.is_whole and summary.has_manifest))
    num_failed = 0
    with byte_progress(counter.now) as counter.show:
        for summary, row in zip(found, rows, strict=True):
            counter.name = summary.name
            row |= {"verified": False, "damage": []}
            if not summary.is_whole:
                num_failed += summary.has_manifest
            elif not summary.has_manifest:
                num_failed += 1
                row["damage"] = [f"there is no manifest to compare with: `loaderkit manifest {summary.url}` writes one"]
            else:
                try:
                    row["damage"] = verify_checkpoint(summary.url, progress=counter.add).damage
                except (CheckpointError, FormatError, ConnectorError) as error:
                    row["damage"] = [str(error)]
                row["verified"] = not row["damage"]
                num_failed += not row["verified"]
    return num_failed


def _tell(url: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        console.tell(f"{url}: no checkpoints")
        return
    has_tiers = any(row["tier"] is not None for row in rows)
    cells = [("name", "step", "age", "size", "tier" if has_tiers else "")]
    for row in rows:
        step = "-" if row["step"] is None else str(row["step"])
        age = "-" if row["age_s"] is None else say_age(row["age_s"])
        state = f"{row['tier']:<5}  {_state(row)}" if has_tiers else _state(row)
        cells.append((row["name"], step, age, say_size(row["num_bytes"]), state))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    for line in cells:
        name, *numbers = line[:4]
        aligned = "  ".join(text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))
        console.tell(f"{name.ljust(widths[0])}  {aligned}  {line[4]}".rstrip())


def _state(row: dict[str, Any]) -> str:
    if not row["is_whole"]:
        return str(row["problem"])
    if row.get("verified"):
        return f"whole, {row['format']}, every block as in its manifest"
    if row.get("damage"):
        return "; ".join(row["damage"])
    return f"whole, {row['format']}{'' if row['has_manifest'] else ', no manifest'}"
