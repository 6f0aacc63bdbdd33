"""Makes the report on a restore: its speed compared with a raw read, and how its threads spent their time, by object.

open, list ──> restore, with the engine's stats ──> raw read of the same bytes by as many threads
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from loaderkit.checkpoint.transfer.session import TransferSession
from loaderkit.connectors.base import BulkConnector, Connector, counters_of
from loaderkit.connectors.page_cache import cached_share, evict, parts_of
from loaderkit.diagnosis.restores import diagnose_restore
from loaderkit.diagnosis.stats import Stats
from loaderkit.errors import ConfigError
from loaderkit.pipeline.config.model import PipelineConfig
from loaderkit.pipeline.tensor_loader import TensorLoader
from loaderkit.profile.build import machine
from loaderkit.profile.raw_read_baseline import RawRead, read_raw
from loaderkit.profile.report import RestoreReport
from loaderkit.profile.report_parts import ObjectRow, StageTime

_MOST_BARE_S = 10.0
_MOST_ROWS = 20
_FROM_MEMORY = 0.5
_ALL = 0.02  # tolerance of "all" and "none"


def profile_restore(config: PipelineConfig, *, cold: bool) -> RestoreReport:
    """Restore a checkpoint as `config` says, then read its bytes raw. `cold`: both with its files out of the page cache.

    Ctrl-C while it reads ends it: the report is on what was read, and says so. Raises as `loaderkit.restore`, and ConfigError
    if there are no files to be put out of the page cache.
    """
    begin_s = time.perf_counter()
    with TensorLoader(config, {}, time.perf_counter) as loader:
        open_s = time.perf_counter() - begin_s
        connector, objects = loader.source.contents.connector, loader.source.objects
        shards = (shard for entry in loader.stored for shard in entry.shards)
        paths = parts_of(connector, ((shard.key, shard.start, shard.length) for shard in shards))
        if cold and not paths:
            raise ConfigError(
                f"--cold: {loader.source.contents.name} lies in no files of this machine that could be put out of its page "
                "cache"
            )
        if cold:
            evict(paths)
        share = cached_share(paths)
        is_from_disk = share < _FROM_MEMORY if share is not None else cold
        if isinstance(connector, BulkConnector):
            connector.time_objects()
        session = loader.fill()
        begin_s = time.perf_counter()
        num_tensors, partial = 0, None
        try:
            for given in session:
                num_tensors += len(given)
                del given  # a large tensor must not wait for the next one
        except KeyboardInterrupt:
            partial = "interrupted"
            session.close()
        wall_s = time.perf_counter() - begin_s
        stats = loader.stats()
        values = {
            "partial": partial,
            "num_tensors": num_tensors,
            "open_s": open_s,
            "wall_s": wall_s,
            "store": counters_of(connector),
            "objects": _rows(session, connector),
        }
        sizes = {
            key: min(totals.num_bytes, objects[key].size) if key in objects else totals.num_bytes
            for key, totals in list(session.totals.objects.items())
        }
        bare = None
        if partial is None:
            try:
                if is_from_disk:
                    evict(paths)
                bare = read_raw(
                    connector,
                    objects,
                    sizes,
                    session.engine.pools[0].num_workers,
                    part_bytes=session.most_bytes,
                    most_s=_MOST_BARE_S,
                    direct=session.direct,
                )
            except KeyboardInterrupt:
                values["partial"] = "interrupted in the bare read"
        note = "" if share is None or bare is None else _where(share)
        return _report(config, loader, session, stats, bare, note, values)


def _where(share: float) -> str:
    """Where the bytes of both reads came from; `share` of them lay in the page cache before."""
    if share < _ALL:
        return "both from disk"
    if share > 1 - _ALL:
        return "both from the page cache"
    return f"{share:.0%} lay in the page cache at first, and {'nothing' if share < _FROM_MEMORY else 'all'} for the bare read"


def _report(  # noqa: PLR0917
    config: PipelineConfig,
    loader: TensorLoader,
    session: TransferSession,
    stats: Stats,
    bare: RawRead | None,
    note: str,
    values: dict[str, Any],
) -> RestoreReport:
    totals, wall_s = session.totals, values["wall_s"]
    bytes_per_s = totals.needed_bytes / max(wall_s, 1e-9)
    percent = 100.0 * bytes_per_s / bare.bytes_per_s if bare is not None and bare.num_bytes else None
    waited = stats.to_dict()["stall"]["by_stage"]
    rows: list[ObjectRow] = values.pop("objects")
    read_s = sum(row.read_s for row in rows)
    verify_s = sum(row.verify_s for row in rows)
    return RestoreReport(
        name=config.name,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        url=loader.source.contents.name,
        format=loader.source.contents.format,
        verdict=diagnose_restore(
            waited, wall_s, percent, session.engine.pools[0].num_workers, verify_s / max(read_s + verify_s, 1e-9)
        ),
        num_bytes=totals.needed_bytes,
        fetched_bytes=totals.fetched_bytes,
        num_reads=totals.num_reads,
        num_reread=totals.num_reread,
        verified=bool(loader.source.checksums),
        threads=session.engine.pools[0].num_workers,
        bytes_per_s=bytes_per_s,
        bare_bytes_per_s=None if bare is None else bare.bytes_per_s,
        percent_of_bare=percent,
        note=note,
        waited=waited,
        stages=[StageTime(**{name: getattr(row, name) for name in StageTime.model_fields}) for row in stats.stages],
        objects=sorted(rows, key=lambda row: -(row.read_s + row.verify_s + row.copy_s + row.cast_s))[:_MOST_ROWS],
        num_objects=len(rows),
        **values,
    )


def _rows(session: TransferSession, connector: Connector) -> list[ObjectRow]:
    times = connector.object_times() if isinstance(connector, BulkConnector) else {}
    rows = []
    for key, totals in list(session.totals.objects.items()):  # at once: a read that hangs may come back
        name = connector.describe(key)
        first_byte_s, body_s = times.get(name.partition("!")[0], (None, None))  # of an archive
        rows.append(
            ObjectRow(
                object=name,
                read_s=totals.seconds,
                first_byte_s=first_byte_s,
                body_s=body_s,
                **{name: getattr(totals, name) for name in ("num_bytes", "num_reads", "verify_s", "copy_s", "cast_s")},
                bytes_per_s=totals.num_bytes / max(totals.seconds, 1e-9),
            )
        )
    return rows
