"""Writes docs/reference.md from the code: every key of the YAML with type, default and meaning, the calls in Python, and the
command line.

python docs/make_reference.py            writes the file
python docs/make_reference.py --check    says whether it is up to date
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import python_reference
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from loaderkit._internal.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from loaderkit.checkpoint.manager.settings import (
    BestArgs,
    CopyArgs,
    Every,
    KeepArgs,
    LocalArgs,
    NoticeArgs,
    SaveSettings,
    UploadArgs,
    parse_speed,
)
from loaderkit.cli.app import app
from loaderkit.connectors.config import CacheArgs, ReadAheadArgs, RetryArgs, S3Args
from loaderkit.diagnosis import restores, verdict
from loaderkit.diagnosis.watched import lines
from loaderkit.metrics.families import CHECKPOINT_FAMILIES, FAMILIES, PREFIX
from loaderkit.pipeline.config.mixture import ChangeArgs, MixArgs, MixedArgs
from loaderkit.pipeline.config.model import (
    BlockArgs,
    ErrorsArgs,
    MetricsArgs,
    OrderArgs,
    PrefetchArgs,
    RanksArgs,
    RayArgs,
)
from loaderkit.pipeline.config.registry import SOURCES, STAGES
from loaderkit.profile import ranks, report, report_parts
from loaderkit.profile.port import parts as ported
from loaderkit.stages.base import StageArgs
from loaderkit.stages.media.audio import AudioArgs
from loaderkit.stages.media.video import VideoArgs

TARGET = Path(__file__).parent / "reference.md"

HEAD = """# Reference

Made from the code by `docs/make_reference.py`; a test keeps it true. How things behave is in the [guide](guide/index.md).

A pipeline is a mapping with these keys; only `source` (or `sources`) and `stages` are required:

| key | meaning |
|---|---|
| `version` | 1 |
| `name` | for messages and reports; default: the file's name |
| `source` | which samples there are, and where: [sources](#sources) |
| `sources`, `mix` | several of them, in the place of `source`: [mixtures](#mixtures) |
| `order` | which comes when: [order](#order) |
| `stages` | what is done to them, in this order; each is a name, or a name with arguments: [stages](#stages) |
| `prefetch` | how far to work ahead: [prefetch](#prefetch) |
| `errors` | what to do with bad samples: [errors](#errors) |
| `ranks` | how ranks that need the same batches get them: [ranks](#ranks) |
| `metrics` | where Prometheus reads what the loader counts: [metrics](#metrics) |
| `output` | a list of fields: batches are then tuples in that order; default: batches are dicts |

Sizes are numbers of bytes or text with a unit (`64MiB`, `2GB`); durations are seconds or text (`500ms`, `60s`, `5min`).
`${VAR}` and `${VAR:-default}` in any value are taken from the environment; `$${` stands for `${`. Relative paths are relative
to the YAML file, or to the working directory for a dict, `Pipeline` or override.
"""

TYPE_NAMES = {
    Every: "integer \\| duration",
    int: "integer",
    float: "number",
    str: "text",
    bool: "true \\| false",
    Any: "any",
    type(None): "null",
}

STORES = """Where a `url` may lead: a path or `file://`; `s3://bucket/prefix`; `gs://`, `az://`, `http(s)://`, `hf://` through fsspec, and
`fsspec+scheme://` for any other scheme that fsspec knows; a scheme that a package brings ([extending](extending.md#a-connector)); `memory://` and any scheme for which `build(connectors={...})` gives a connector.
A URL is taken literally (`%20` and `+` are those characters), and must not hold credentials. Of a link on a web server's index page the
key is the file's name: `a b.jpg`, not `a%20b.jpg`. Only `%23`, `%25`, `%2B`, `%2F`, `%3F` and bytes that are no UTF-8 stay as they are.
"""

MIXTURES = """`sources` is a list in the place of `source`; how they take turns is in the [guide](guide/mixing.md). Each entry may have `stages`:
sample stages for its own samples, which run behind `read` and before the common ones.
"""

CHECKPOINTS = """The settings of [`loaderkit.CheckpointManager`](#loaderkitcheckpointmanager): arguments, a mapping, or a file such as `checkpoint.yaml`.
"""

METRICS = """Counters end in `_total`. All have the labels `pipeline` (its name) and `rank`, but for `loaderkit_checkpoint_*`, which are of the process.
`loaderkit_store_*` are the counters of the connectors in use, as `store` in [statistics](#statistics) lists them: `num_requests` is `loaderkit_store_requests_total`,
`body_s` is `loaderkit_store_body_seconds_total`.
"""

BATCH = """## Batches

A batch is a dict: one tensor a field (`[B, ...]`; images uint8 `[B, 3, H, W]`, or floats behind `normalize`), a list for
fields that are text, bytes or objects, and `__key__`, the list of the samples' keys. With several ranks and without
`drop_last` it also has `__wrapped__`, bool `[B]`: the slots of samples that were read a second time to make ranks equal.
With `__wrapped__` in `output` every batch has it, False where no sample comes twice.
A padded field `f` (`ragged: {f: pad}`) comes with `f_sizes`, the shapes before padding. A batch of a mixture has `__source__`, int64 `[B]`: the
places of the samples' sources in `sources`, whose names are `loader.sources`.
"""

STATS = """## Statistics

`loader.stats().to_dict()`; `stats(since=earlier)` gives the difference of two moments. Times in seconds, intervals that are
still open included. With `executor: process` the processes are asked one after another, each up to the same moment: it takes 1 to 2 ms, and up
to 15 where functions there hold the GIL; one that does not answer within a second is shown as it was last.

| key | meaning |
|---|---|
| `wall_s` | since the first wait for a batch, or since the earlier moment |
| `num_batches`, `num_samples` | delivered |
| `num_dropped` | samples that `filter` left out of these batches |
| `stall.total_s`, `stall.percent` | time inside `next()` that ended in a batch, and its share of `wall_s` |
| `stall.by_stage` | the same time by what was waited for: a stage; `start` (before the first chunk could run); `memory` (waiting for budget); `wakeup` (delivered, the loop not yet running); `network` (complete on another node, not here yet); `worker restart` |
| `stages[]` | `workers`, `num_items`, `num_bytes`, `num_failed`; `busy_s`, of it `cpu_s` on a CPU and `delayed_s` ready to run while no CPU was free (the rest waiting for I/O, a lock or the GIL); `starved_s` (no input), `blocked_s` (no room downstream), `idle_s`; `slot_s`, their sum; `p50_s`, `p99_s` per item; `num_queued`, chunks that wait for its pool just now |
| `throughput` | `samples_per_s` delivered, `bytes_per_s` read |
| `memory` | `budget_bytes`, `slab_bytes` (one batch), `batch_bytes` (the same with what lies in no slab), `open_bytes` (in the budget), `live_bytes` (also delivered and still seen), `allocated_bytes`, `rss_bytes`, `rss_peak_bytes`; with `executor: process` also `process_rss_peak_bytes`, of that process |
| `sources[]` | of a mixture, by source: `num_samples` that the loop got (with `pack` documents, of which one that is cut counts where it begins), their `num_tokens` if they are known, its `share` of them (`share_of`: `samples`, or `tokens` if weights are shares of these), the `weight` that was planned over these batches, `samples_per_s`; `num_dropped` by `filter`, `num_bad` samples (each counted once an epoch), and what became of them: `num_skipped`, `num_replaced`; `num_items` and `num_bytes` read, `bytes_per_s`; `read_s`, and `stages_s` in its own stages behind `read`; of both together `cpu_s`, `delayed_s`, `waiting_s`, and `stall_s`, what the loop waited for them, with its `stall_percent` of the time; `num_passes` over its samples since epoch 0, all ranks together (with `pack` about), and `is_used_up` in this epoch |
| `nodes[]` | only where there are several, the trainer's first: `name`, `is_trainers`, `num_workers`, `cpus` that Ray has given out there (null: not known), `cpu_s` of the workers and `cpus_used`; `num_batches` and `num_bytes` that arrived from there, `network_bytes_per_s`; `way_s` from complete there to arrived here, summed over batches, `carrying_s` with at least one on the way and its `carrying_share` of the time; `latency_s`, the least round trip of a message (null: none was timed); `num_restarts` |
| `queue` | batches `ready` for the loop, and `open` (in the budget, complete or not), just now |
| `host` | of the process that loads: `cpu_s`; `throttled_s` by the cgroup's CPU quota; `idle_s` of the CPUs it may use, added up; `read_bytes` by system calls, `disk_bytes` fetched for them, `page_cache_hits` (share); `late_p50_s`, `late_p99_s`: how late a thread of the trainer's process wakes up (CPU and the GIL). null: not known |
| `store` | what connectors count; below |
| `transfer` | copies to a GPU: `num_bytes`; of those that were timed `timed_bytes`, `copy_s` by the GPU's own clock, `exposed_s` of it while the loop waited for the batch, and so `bytes_per_s` and `overlap`, the share of `copy_s` in which the loop did not wait; not timed are sparse and nested tensors, those that cannot be pinned, and batches that are small or were held up ([when](guide/gpu.md)); empty where batches stay on the CPU |
| `verdict` | what limits the loop: `stage` (or `start`, `memory`, `wakeup`, `network`, `worker restart`; null: training is the limit), `percent` of the wall time lost to it, `confidence` from 0 to 1, `evidence`, the `change` to make, `kind`: [verdicts](guide/stalls.md#the-verdict); `source`: the one of several sources that alone holds the loop up, and what says so, or null |
| `tuning` | `executor` that runs, and where that is not the one asked for its `executor_reason`, `cpus` (that this process may use), `concurrency`, `batches`, `pools`: which stages share how many workers; with `executor: process` also `processes` and their `pids`; with `ranks: {share: broadcast}` the rank that reads, `reader`, and the other ranks that get its batches, `peers`; where a crop comes next to `decode`, `jpeg`: how much of one is decoded, `whole` or `crop of` that stage; with `auto`: the sizes that are measured, whether they are `settled`, and the last 100 `decisions` (`at_s`, `knob`, `before`, `after`, `reason`, `effect`, `kept`, `gain` in throughput as a share, `stages` whose workers they are) |

`loader.series()` is a list of dicts, one for each step of time: `at_s`, `seconds`; shares of it in `stall` (by cause) and `throttled`;
busy workers on average in `busy` (by stage), CPUs in `cpus`; `samples_per_s`, `bytes_per_s`, `page_cache_hits`; at its end `workers`,
`queued` (by stage), `ready`, `open`, `batches`, `processes`, `live_bytes`, `rss_bytes`, `late_s`.

In `store`, as far as the connectors in use have them: `first_byte_s` and `body_s` (of all reads together: until the first bytes came,
and from then on), `num_requests`, `num_retries`, `num_timeouts` (requests given up),
`num_checksum_failures`, `fetched_bytes` (from the store), `over_read_bytes` (fetched along with what was wanted; with a cache they may
be wanted later); `ahead_bytes` (fetched ahead), `ahead_wait_s` (of the time in `read`: that workers waited for them), `held_bytes` (of them in memory now), `num_direct_reads` and `direct_bytes` (not
fetched ahead); `cache_hit_bytes`, `cache_missed_bytes`, `cache_hit_rate` (by bytes), `num_cache_damaged` (fetched anew),
`num_cache_evicted`, `num_cache_failures` (the disk was full or failed).

Stages that share a pool are listed singly: starved and idle stand at the pool's first, blocked at its last, and the pool's
rows sum to its workers' time.
"""


def in_words(description: str | None) -> str:
    """A description for a cell of a table: outside of code, `*` and `__` are themselves."""
    parts = (description or "").split("`")
    return "`".join(
        part if number % 2 else re.sub(r"\*|__", lambda found: "".join(f"\\{mark}" for mark in found[0]), part)
        for number, part in enumerate(parts)
    )


def type_name(annotation: Any, field: FieldInfo | None = None) -> str:
    """A type as a reader of YAML would call it."""
    metadata = list(field.metadata) if field is not None else []
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        annotation, metadata = parts[0], [*metadata, *parts[1:]]
        origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    functions = {getattr(item, "func", None) for item in metadata}
    if parse_bytes in functions:
        return "size"
    if parse_speed in functions:
        return "speed"
    if parse_seconds in functions:
        return "duration"
    if origin is typing.Literal:
        return " \\| ".join(str(part).lower() if isinstance(part, bool) else f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join("null" if part is type(None) else type_name(part) for part in parts)
    if origin is tuple:
        inner = [type_name(part) for part in parts if part is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in parts else "[" + ", ".join(inner) + "]"
    if origin is not None and issubclass(origin, typing.Mapping):
        return "mapping"
    if annotation in TYPE_NAMES:
        return TYPE_NAMES[annotation]
    return "text" if typing.Callable in (annotation, origin) or str(origin).endswith("Callable'>") else "mapping"


def default_of(field: FieldInfo, annotation: Any) -> str:
    """The default as it would stand in YAML."""
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined or isinstance(value, BaseModel) or value == {}:
        return ""
    name = type_name(annotation, field)
    if value is None:
        return "null"
    if name == "size":
        return f"`{format_bytes(value)}`"
    if name == "duration":
        return f"`{format_seconds(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f"{item:.4g}" if isinstance(item, float) else str(item) for item in value) + "]`"
    return f"`{value}`"


def table(model: type[BaseModel], skip: typing.Container[str] = ()) -> str:
    """The keys of a model as a Markdown table; empty if there are none."""
    hints = typing.get_type_hints(model, include_extras=True)
    rows = [
        f"| `{field.alias or name}` | {type_name(hints[name], field)} | {default_of(field, hints[name])} | {in_words(field.description)} |"
        for name, field in model.model_fields.items()
        if name not in skip
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n" if rows else ""


def summary(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "")


def render() -> str:
    """The whole page."""
    parts = [HEAD, "## Sources\n"]
    for kind, source in SOURCES.ours.items():
        parts += [f"### `kind: {kind}`\n", summary(source.args) + "\n", table(source.args, skip={"kind"})]
    parts.append("## Stores\n\n" + STORES)
    for name, model in (("s3", S3Args), ("retry", RetryArgs), ("cache", CacheArgs), ("read_ahead", ReadAheadArgs)):
        parts += [f"### `source.{name}`\n", summary(model) + "\n", table(model)]
    parts += ["## Mixtures\n", MIXTURES, summary(MixedArgs) + "\n", table(MixedArgs)]
    parts += ["### `mix`\n", summary(MixArgs) + "\n", table(MixArgs)]
    parts += ["Each of `mix.changes`:\n", table(ChangeArgs)]
    parts += ["## Order\n", summary(OrderArgs) + "\n", table(OrderArgs)]
    parts += ["`order.block`, for `shuffle: block`:\n", table(BlockArgs)]
    parts += ["## Stages\n", "Every stage also takes:\n", table(StageArgs)]
    for kind, stage in STAGES.ours.items():
        where = {"sample": "before `batch`", "batch": "behind `batch`", "either": "on either side of `batch`"}
        side = f" Stands {where[stage.scope]}." if stage.scope in where else ""
        parts += [f"### `{kind}`\n", summary(stage.args) + side + "\n", table(stage.args, skip=StageArgs.model_fields)]
        for key, model in {"video": VideoArgs, "audio": AudioArgs}.items() if kind == "decode" else ():
            parts += [f"`decode.{key}`: {summary(model)} More in [{key}](jobs/{key}.md).\n", table(model)]
    parts += ["## Prefetch\n", summary(PrefetchArgs) + "\n", table(PrefetchArgs)]
    parts += ["`prefetch.ray`, for `executor: ray`:\n", table(RayArgs)]
    parts += ["## Errors\n", summary(ErrorsArgs) + "\n", table(ErrorsArgs)]
    parts += ["## Ranks\n", summary(RanksArgs) + "\n", table(RanksArgs)]
    parts += ["## Metrics\n", summary(MetricsArgs) + " More in the [guide](guide/metrics.md).\n", table(MetricsArgs)]
    parts += [METRICS, families()]
    parts += ["## Checkpoints\n", CHECKPOINTS, table(SaveSettings)]
    sections = {
        "local": LocalArgs,
        "local.upload": UploadArgs,
        "keep": KeepArgs,
        "keep.best": BestArgs,
        "copies": CopyArgs,
        "notice": NoticeArgs,
    }
    for name, model in sections.items():
        parts += [f"### `{name}`\n", summary(model) + "\n", table(model)]
    parts += [
        BATCH,
        python_reference.render(),
        STATS,
        "## Stall report\n",
        report_tables(),
        "## Command line\n",
        commands(),
    ]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def families() -> str:
    """The metrics as a Markdown table."""
    rows = [
        f"| `{PREFIX}{name}{'_total' if family.kind == 'counter' else ''}` | {', '.join(f'`{label}`' for label in family.labels)} | {family.help} |"
        for name, family in {**FAMILIES, **CHECKPOINT_FAMILIES}.items()
    ]
    return "\n".join(["| metric | labels | meaning |", "|---|---|---|", *rows]) + "\n"


def report_tables() -> str:
    """The report's JSON: a table for every object in it."""
    parts_by_name = {name: model for name, model in vars(report_parts).items() if name != "Part"}
    known = [
        report.Report,
        *parts_by_name.values(),
        lines.LineTimes,
        lines.CostlyLine,
        ported.PortedLoader,
        ported.SampleCheck,
        ported.Unported,
        ranks.RankRow,
        ranks.Merged,
        report.RestoreReport,
        restores.RestoreVerdict,
    ]
    models = [model for model in known if isinstance(model, type) and issubclass(model, verdict.Part)]
    parts = [
        "What `loaderkit profile --json` writes and `report.to_dict()` of `with loader.profile() as report` returns. The whole is "
        f"`Report`, `schema_version` {report.SCHEMA_VERSION}; new keys may come without a new version. `profile --merge --json` writes "
        "`Merged`, and of a pipeline that restores a checkpoint it is a `RestoreReport`.\n"
    ]
    for model in models:
        rows = [
            f"| `{name}` | {json_type(field.annotation)} | {in_words(field.description)} |"
            for name, field in model.model_fields.items()
        ]
        rows += [
            f"| `{name}` | {json_type(field.return_type)} | {in_words(field.description)} |"
            for name, field in model.model_computed_fields.items()
        ]
        parts += [f"### `{model.__name__}`\n", summary(model) + "\n"]
        parts.append("\n".join(["| key | type | meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def json_type(annotation: Any) -> str:
    """A type as JSON has it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(json_type(part) for part in parts)
    if origin is list:
        return f"list of {json_type(parts[0])}"
    if origin is dict or annotation is dict:
        return "object"
    if origin is typing.Literal:
        return " \\| ".join(f"`{part}`" for part in parts)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"`{annotation.__name__}`"
    return TYPE_NAMES[annotation]


def commands() -> str:
    """Every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = [
        "Exit codes: 0 all is well; 1 the work failed (data, store); 2 wrong use (a bad flag, a wrong pipeline).\n"
    ]
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(p.name.upper() + ("..." if p.nargs == -1 else "") for p in arguments)
        parts.append(f"### `loaderkit {name}{' ' + usage if usage else ''}`\n")
        parts.append((command.help or "").split("\f")[0].strip() + "\n")
        rows = []
        for parameter in command.params:
            if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
                flags = ", ".join(f"`{flag}`" for flag in parameter.opts)
                rows.append(f"| {flags} | {' '.join((parameter.help or '').split())} |")
        if rows:
            parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
