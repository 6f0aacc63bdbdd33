"""`loaderkit init`: a pipeline for the data at a place."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loaderkit._internal.atomic_file import write_atomically
from loaderkit.cli.check import checked_pipeline, said_of_fields
from loaderkit.cli.outputs import check_free
from loaderkit.cli.terminal import console
from loaderkit.cli.terminal.options import Debug
from loaderkit.errors import printable

if TYPE_CHECKING:
    from loaderkit.cli.init.kinds import FoundSource
    from loaderkit.cli.init.stages import Line

_WIDTH = 48  # of a stage, before its comment


def init(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE", help="A folder, a file, or a URL such as s3://bucket/data.", show_default=False
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="The pipeline that is written; - prints it.")] = (
        "pipeline.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    debug: Debug = False,
) -> None:
    """Look at the data at PLACE, and write a pipeline for it that `loaderkit check` passes.

    Some of the names are listed, and a few samples read. Then it is checked, as `loaderkit check` does it.
    """
    from loaderkit.cli.init.place import opened_place
    from loaderkit.cli.init.samples import see_samples
    from loaderkit.cli.init.sources import find_source
    from loaderkit.cli.init.stages import as_tokens, hints, stages_for

    path = None if out == "-" else Path(out)
    if path is not None:
        check_free(path, "--out", force=force)
    with opened_place(place) as opened:
        found, is_cut = find_source(opened), opened.is_cut
    seen = see_samples(found)
    if (tokens := as_tokens(found, seen)) is not found:
        found, seen = tokens, see_samples(tokens)
    lines = stages_for(found, seen)
    stages = [{line.name: line.args} if line.args else line.name for line in lines]
    name = re.sub(r"[^\w.-]+", "-", place.rstrip("/").rpartition("/")[2]).strip("-.") or "pipeline"
    pipeline = {
        "version": 1,
        "name": name,
        "source": found.section,
        "order": {"shuffle": _shuffle(found.section), "seed": 0},
    }
    checked = checked_pipeline({**pipeline, "stages": stages})
    told = [f"{place}: {_said(checked, found)}", *found.notes]
    if is_cut:
        told.append("there are more names than were looked at")
    if bad := checked["num_bad_in_first_batch"]:
        told.append(f"{bad} samples tried for the first batch are bad: `loaderkit check` says more")
    pipeline["source"] = {**found.section, "url": _seen_from(found.section["url"], path)}
    text = _text(pipeline, lines, [f"Made by `loaderkit init {shlex.quote(place)}`.", *told, *hints(seen)], checked)
    if path is None:
        console.tell(text.rstrip("\n"))
        for line in told:
            console.say(line)
        return
    write_atomically(path, text)
    for line in told:
        console.tell(line)
    console.tell(f"{path}: it works, with batches of {', '.join(said_of_fields(checked))}")


def _shuffle(section: dict[str, Any]) -> str:
    """Blocks of neighbours, where several samples are read or unpacked together."""
    are_parts = (
        section["kind"] in ("tar", "parquet", "zarr", "hdf5", "huggingface") and section.get("samples") != "whole"
    )
    return "block" if are_parts else "global"


def _seen_from(url: str, path: Path | None) -> str:
    """The URL as it stands in the file: a relative path counts from there."""
    if "://" in url or os.path.isabs(url) or path is None:
        return url
    return os.path.relpath(url, path.parent)


def _said(checked: dict[str, Any], found: FoundSource) -> str:
    """What was seen: "1,300 JPEG files in 10 class folders"."""
    num = "samples" if checked["num_listed"] is None else f"{checked['num_listed']:,}"
    classes = "" if checked["classes"] is None else f" in {len(checked['classes']):,} class"
    return f"{num} {found.noun}" + (classes and classes + (" folders" if "label" in found.section else "es"))


def _text(pipeline: dict[str, Any], lines: list[Line], comments: list[str], checked: dict[str, Any]) -> str:
    from loaderkit._internal.config.yaml_text import to_yaml

    def flow(value: Any) -> str:
        return to_yaml(value, flow=True, width=2**20).removesuffix("\n").removesuffix("\n...")

    parts = [f"# {printable(line)}" for line in comments]
    parts += ["version: 1", f"name: {flow(pipeline['name'])}", "", "source:"]
    parts += [f"  {key}: {flow(value)}" for key, value in pipeline["source"].items()]
    parts += ["", "# The order is new in every epoch, and the same on every run.", f"order: {flow(pipeline['order'])}"]
    parts += ["", f"# A batch has {printable(', '.join(said_of_fields(checked)))}.", "stages:"]
    for line in lines:
        item = f"  - {line.name}" + (f": {flow(line.args)}" if line.args else "")
        parts.append(f"{item:<{_WIDTH}}# {line.comment}" if line.comment else item)
    parts += ["", "# To go on without damaged samples, up to 100 an epoch and rank:"]
    parts.append("# errors: {on_bad_sample: replace, max_bad_samples: 100}")
    return "\n".join(parts) + "\n"
