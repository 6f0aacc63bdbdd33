"""Workers on several nodes: what the ledger counts, and the verdict on a way that was made to be the limit, or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_accounts import settings_of

from loaderkit import Pipeline
from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import headline
from loaderkit.engine.metrics.contention import ContentionResult
from loaderkit.engine.metrics.nodes.counts import Nodes
from loaderkit.engine.metrics.nodes.ledger import Cover, NodeLedger
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.metrics.stalls import WAKEUP, WaitSegment, charge
from loaderkit.engine.metrics.tuning import PoolTuning, Tuning
from loaderkit.profile.settings_patch import settings_for
from profiles.bottlenecks import contradictions

_NUM_BATCHES = 60


@dataclass(frozen=True)
class Job:
    """A made-up job: seconds a batch that its workers, the way and the loop take, each alone."""

    making_s: float
    bytes_s: float  # of the way, for its bytes
    latency_s: float  # of the way, for messages
    step_s: float
    ahead: int  # batches that are finished or in work at a time
    num_nodes: int = 2

    def run(self) -> Stats:
        """Its accounts, by following every batch: workers make one after the other, the way carries one after the other, the
        loop takes them in order."""
        ledger = NodeLedger("here")
        taken_s: list[float] = []
        done_s = way_free_s = loop_free_s = busy_s = 0.0
        waits_s: dict[str, float] = {}
        for number in range(_NUM_BATCHES):
            room_s = taken_s[number - self.ahead] if number >= self.ahead else 0.0
            since_s = max(done_s, room_s)
            done_s = since_s + self.making_s
            busy_s += self.making_s
            way_free_s = max(way_free_s, done_s) + self.bytes_s
            arrived_s = way_free_s + self.latency_s
            ledger.arrived(f"node-{number % self.num_nodes}", 10**6, done_s, arrived_s)
            path = [
                WaitSegment(0.0, since_s, "read"),  # it has not begun: its worker is with the batch before
                WaitSegment(since_s, done_s, "read"),
                WaitSegment(done_s, arrived_s, "network"),
                WaitSegment(arrived_s, arrived_s + 1.0, WAKEUP),
            ]
            for cause, seconds in charge(path, loop_free_s, max(loop_free_s, arrived_s)).items():
                waits_s[cause] = waits_s.get(cause, 0.0) + seconds
            taken_s.append(max(loop_free_s, arrived_s))
            loop_free_s = taken_s[-1] + self.step_s
        for number in range(self.num_nodes):
            ledger.round_trip(f"node-{number}", max(self.latency_s / 3, 1e-5))
        row = StageStats("read", 1, busy_s=busy_s, blocked_s=loop_free_s - busy_s, kind="read", num_items=_NUM_BATCHES)
        return replace(
            Stats.empty([row], 10**9),
            wall_s=loop_free_s,
            num_batches=_NUM_BATCHES,
            num_samples=_NUM_BATCHES,
            waits_s=waits_s,
            tuning=Tuning("ray", self.ahead, cpus=64, pools=(PoolTuning(("read",), 1),)),
            nodes=ledger.stats([(f"node-{n}", 1.0) for n in range(self.num_nodes)]),
        )


limits = st.sampled_from(["read", "network", "training"])


@st.composite
def jobs(draw: st.DrawFn, limit: str) -> Job:
    """Jobs with one limit, which takes at least half as long again as anything else."""
    longest_s = draw(st.floats(1e-3, 1.0))
    seconds = {name: longest_s * draw(st.floats(0.02, 0.65)) for name in ("read", "network", "training")}
    seconds[limit] = longest_s
    latency_s = min(seconds.values()) * draw(st.floats(0.0, 0.2))
    ahead = draw(st.integers(6, 16))
    num_nodes = draw(st.integers(1, 5))
    return Job(seconds["read"], seconds["network"], latency_s, seconds["training"], ahead, num_nodes)


@given(limits, st.data())
def test_the_verdict_is_the_network_if_and_only_if_that_is_the_limit(limit: str, data: st.DataObject) -> None:
    job = data.draw(jobs(limit))
    seen = job.run()
    found = seen.verdict()
    assert (found.stage, found.kind == "network") == (None if limit == "training" else limit, limit == "network")
    assert sum(seen.stall_s.values()) == pytest.approx(sum(seen.waits_s.values()))
    assert not contradictions(seen.to_dict())
    assert headline("network", "network") != headline("network", "depth")


@given(st.floats(1e-3, 0.1), st.integers(1, 2), st.integers(1, 4))
def test_a_way_of_messages_is_not_full(latency_s: float, ahead: int, num_nodes: int) -> None:
    """Batches come one at a time, and each takes the time of messages: more of them ahead would fill the way."""
    job = Job(latency_s / 50, latency_s / 100, latency_s, latency_s / 50, ahead, num_nodes)
    found = job.run().verdict()
    assert (found.stage, found.kind) == ("network", "depth")
    assert settings_of(found)["prefetch.batches"] == 2 * ahead
    deeper = replace(job, ahead=200).run().verdict()
    assert deeper.percent < found.percent


def test_a_node_that_is_far_away_is_named() -> None:
    seen = Job(0.001, 0.1, 0.0, 0.001, 8).run()
    here, near, far = seen.nodes.rows
    rows = (here, near, replace(far, way_s=10 * far.way_s))
    assert (
        f"from {far.name} a batch takes" in replace(seen, nodes=Nodes(rows, seen.nodes.carrying_s)).verdict().evidence
    )
    assert "from node" not in seen.verdict().evidence


def test_sizes_and_speeds_are_in_the_same_units() -> None:
    assert ", 1.00 MB each, and for 100 % of the time" in (
        found := Job(0.001, 0.1, 0.0, 0.001, 8).run().verdict().evidence
    )
    assert "10 MB/s meanwhile" in found


def test_a_full_way_that_is_not_waited_for_is_no_limit() -> None:
    seen = Job(0.001, 0.1, 0.0, 0.001, 8).run()
    assert replace(seen, waits_s={"read": 0.01}).verdict().kind == "training"


def test_a_way_that_the_gil_makes_long_is_no_limit() -> None:
    """Where workers that are always busy hold the GIL of their process, what sends a batch waits for it as well."""
    job = Job(0.03, 0.028, 0.0, 0.001, 8)
    seen = job.run()
    assert seen.has_full_network
    assert seen.verdict().stage == "network"
    held = replace(seen, trials={"read": ContentionResult(gil_taken=1.0)})
    assert held.verdict().stage == "read"
    assert sum(held.stall_s.values()) == pytest.approx(sum(held.waits_s.values()))
    full = replace(job, making_s=0.01).run()
    assert replace(full, trials=held.trials).verdict().stage == "network", "workers that find no room are not busy"


# ------------------------------------------------------------------------------------------------- the ledger


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(-2, 30)), max_size=60))
def test_a_cover_counts_every_moment_once(spans: list[tuple[int, int]]) -> None:
    cover = Cover()
    for begin, length in spans:
        cover.add(begin, begin + length)
    covered = {moment for begin, length in spans for moment in range(begin, begin + length)}
    assert cover.total_s == len(covered)


@given(st.integers(65, 300), st.floats(0.01, 0.9))
def test_a_cover_of_many_spans_in_order_counts_all(number: int, length: float) -> None:
    cover = Cover()
    for begin in range(number):
        cover.add(begin, begin + length)
    assert cover.total_s == pytest.approx(number * length)


arrivals = st.lists(
    st.tuples(st.sampled_from(["a", "b", "here"]), st.integers(0, 10**7), st.floats(0, 100), st.floats(0, 10)),
    max_size=40,
)


@given(arrivals, arrivals)
def test_rows_sum_up_what_happened_between_two_moments(
    before: list[tuple[str, int, float, float]], after: list[tuple[str, int, float, float]]
) -> None:
    ledger = NodeLedger("here")
    for node, num_bytes, done_s, way_s in before:
        ledger.arrived(node, num_bytes, done_s, done_s + way_s)
    earlier = ledger.stats([("a", 1.0), ("here", 2.0)])
    for node, num_bytes, done_s, way_s in after:
        ledger.arrived(node, num_bytes, done_s, done_s + way_s)
    ledger.restarted("a")
    later = ledger.stats([("a", 1.5), ("a", 0.25), ("here", 2.0)])
    found = {row.name: row for row in later.minus(earlier).rows}
    for name in {"a", "here"} | {node for node, *_ in [*before, *after]}:
        own = [one for one in after if one[0] == name]
        assert found[name].num_batches == len(own)
        assert found[name].num_bytes == sum(one[1] for one in own)
        assert found[name].way_s == pytest.approx(0.0 if name == "here" else sum(one[3] for one in own), abs=1e-6)
        assert found[name].is_trainers == (name == "here")
    assert (found["a"].num_workers, found["a"].cpu_s, found["a"].num_restarts) == (2, 0.75, 1)
    assert next(row.name for row in later.rows) == "here"


def test_a_node_alone_has_no_rows() -> None:
    ledger = NodeLedger("here")
    ledger.placed("here", 4.0)
    ledger.arrived("here", 10, 0.0, 0.1)
    one = ledger.stats([("here", 1.0)])
    assert one.to_dicts(10.0) == []
    assert one.carrying_s == 0.0
    elsewhere = NodeLedger("here")
    elsewhere.arrived("there", 10, 0.0, 0.1)
    assert [row["name"] for row in elsewhere.stats([("there", 1.0)]).to_dicts(10.0)] == ["here", "there"]
    ledger.placed("there", 8.0)
    ledger.arrived("there", 10**6, 0.0, 0.5)
    here, there = ledger.stats([("here", 1.0), ("there", 5.0)]).to_dicts(10.0)
    assert (here["network_bytes_per_s"], there["network_bytes_per_s"]) == (0.0, 10**5)
    assert (here["cpus"], there["cpus_used"]) == (4.0, 0.5)


def test_a_way_that_wants_more_batches_ahead_gets_them_as_a_setting() -> None:
    seen = Job(0.001, 0.001, 0.05, 0.001, 2).run()
    config = Pipeline.dataset(range(8)).read().batch(8).prefetch(batches=2).config
    (found,) = settings_for(seen.verdict(), seen, config)
    assert (found.key, found.before, found.value) == ("prefetch.batches", 2, 4)
    full = Job(0.001, 0.1, 0.0, 0.001, 8).run()
    assert settings_for(full.verdict(), full, config) == []
