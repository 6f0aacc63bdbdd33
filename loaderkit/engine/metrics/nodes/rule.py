"""The verdict where the loop waited longest for batches that were complete on another node: is the way full or not?

A full way always has a batch on it, and a batch takes as long as its bytes do, many times what a small message takes. On a way
that is not full, batches come one at a time, or their time is that of messages: more batches ahead would fill it.
"""

from __future__ import annotations

from loaderkit._internal.units import say_seconds, say_size
from loaderkit.engine.metrics import bottleneck_words as words
from loaderkit.engine.metrics.bottleneck_rules import without_stage
from loaderkit.engine.metrics.bottleneck_words import Verdict
from loaderkit.engine.metrics.interval import Interval
from loaderkit.engine.metrics.nodes.counts import NodeStats
from loaderkit.engine.metrics.stalls import NETWORK

_SLOW = 3.0  # times the time of a batch from other nodes


def network(interval: Interval) -> Verdict:
    """Batches were complete on other nodes, and not here yet."""
    nodes = interval.stats.nodes
    evidence = (
        f"{words.waited(interval, NETWORK)}: batches that were complete on other nodes; one takes {say_seconds(nodes.way_s)} "
        f"from there to the trainer"
    )
    if nodes.num_carried:
        share = 100 * min(1.0, nodes.carrying_s / interval.wall_s)
        evidence += (
            f", {say_size(nodes.carried_bytes / nodes.num_carried)} each, and for {share:.0f} % of the time at least one "
            f"was on the way: {nodes.bytes_per_s / 1e6:.3g} MB/s meanwhile"
        )
    if nodes.latency_s:
        evidence += f"; a small message and its answer take {say_seconds(nodes.latency_s)}"
    slow = _slow_node(nodes.others)
    if slow is not None:
        evidence += f"; from {slow.name} a batch takes {say_seconds(slow.way_s / slow.num_batches)}"
    if interval.stats.has_full_network:
        change = (
            "fewer bytes: uint8 until `normalize` after `transfer`, smaller images, fewer fields; or more of the workers on "
            "the trainer's node; or a faster network; more nodes would not help"
        )
        return without_stage(interval, NETWORK, evidence, change, sure=0.9)
    change = f"{words.deeper(interval)}, so that more batches are on the way at a time"
    return without_stage(interval, NETWORK, evidence, change, sure=0.8, kind="depth")


def _slow_node(others: tuple[NodeStats, ...]) -> NodeStats | None:
    """The node from which a batch takes several times as long as from all others, if there is such a one."""
    each = {row.name: row.way_s / row.num_batches for row in others if row.num_batches}
    if len(each) < 2:
        return None
    slowest = max(each, key=each.__getitem__)
    rest = [seconds for name, seconds in each.items() if name != slowest]
    return next(row for row in others if row.name == slowest) if each[slowest] > _SLOW * max(rest) else None
