"""`executor: process` as it lives: the same batches, seeks, forks, memory, and what must not be left behind."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import HELPERS
from executors import executor_of
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import nothing_left, resources  # noqa: F401 - a fixture for every test here
from numbers_dataset import PROCESS, Numbers, build, hang, numbers
from waiting import wait_for

import loaderkit
from loaderkit import Pipeline
from loaderkit.engine.process.leases import LeaseTable
from loaderkit.engine.process.receiver import Receiver
from loaderkit.engine.process.shared_memory import Allocator, SharedArena
from loaderkit.errors import ClosedError, ConfigError

pytestmark = pytest.mark.matrix(1)


class TestLiving:
    @pytest.mark.fresh_interpreters
    def test_it_outlives_the_thread_that_started_it(self) -> None:
        """The kernel kills it with the thread that started it, which must therefore be one of ours."""
        loader = build(numbers())
        starter = threading.Thread(target=loader.start)
        starter.start()
        starter.join()
        assert [key for batch in loader for key in batch["__key__"]] == [str(n) for n in range(64)]
        loader.close()

    def test_after_a_fork(self) -> None:
        with build(numbers()) as loader:
            stream = iter(loader)
            first = next(stream)
            pid = os.fork()
            if pid == 0:
                try:
                    next(stream)
                except ClosedError as error:
                    loader.close()
                    del first
                    os._exit(5 if "fork" in str(error) else 6)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
            assert first["x"].tolist() == list(range(8))
            assert len(list(stream)) == 7

    @pytest.mark.prove
    def test_a_script_without_a_guard(self, tmp_path: Path) -> None:
        """Its module is not run a second time."""
        (tmp_path / "things.py").write_text(
            "class Things:\n    def __len__(self): return 8\n    def __getitem__(self, i): return {'x': i}\n"
        )
        (tmp_path / "train.py").write_text(
            "print('begin')\n"
            "import loaderkit\n"
            "from things import Things\n"
            f"loader = loaderkit.build(loaderkit.Pipeline.dataset(Things()).read().batch(4), overrides={PROCESS!r})\n"
            "print(len(list(loader)))\n"
        )
        ran = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True, timeout=60)
        assert ran.stdout.split() == ["begin", "2"]
        assert ran.stderr == ""

    @pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
    @pytest.mark.prove
    def test_with_stdio_closed(self, closed: str, tmp_path: Path) -> None:
        """Neither prints of the trainer nor those of the process that loads end in the memory of batches."""
        script = tmp_path / "train.py"
        script.write_text(
            "import os, sys; sys.path.insert(0, sys.argv[1])\n"
            "from contextlib import suppress\n"
            "import numbers_dataset\n"
            "loader = numbers_dataset.build(numbers_dataset.numbers().call(numbers_dataset.shout))\n"
            "with loader:\n"
            "    found = []\n"
            "    for batch in loader:\n"
            "        for number in (1, 2):\n"
            "            with suppress(OSError): os.write(number, b'trainer' * 2000)\n"
            "        found += [(x, *set(row)) for x, row in zip(batch['x'].tolist(), batch['filling'].tolist())]\n"
            "open(sys.argv[2], 'w').write(repr(found))\n"
        )
        command = f'"$1" "$2" "$3" "$4" {closed}'
        result = tmp_path / "result"
        arguments = [sys.executable, str(script), str(HELPERS), str(result)]
        subprocess.run(["sh", "-c", command, "sh", *arguments], capture_output=True, timeout=60)
        assert result.read_text() == repr([(n, n) for n in range(64)])

    @settings(max_examples=2)
    @given(
        batch=st.integers(3, 20),
        workers=st.integers(1, 4),
        depth=st.integers(1, 6),
        seed=st.integers(0, 99),
        policy=st.sampled_from(["skip", "replace"]),
        extra=st.sampled_from([{}, {"stages.read.workers": 2}, {"stages.batch.workers": 1}]),
    )
    @pytest.mark.prove
    def test_the_same_bytes_as_threads(
        self, batch: int, workers: int, depth: int, seed: int, policy: str, extra: dict[str, Any]
    ) -> None:
        made = (
            Pipeline.dataset(Numbers(50)).shuffle(seed=seed).read().call(shake).batch(batch, ragged={"ragged": "pad"})
        )
        overrides = {
            "prefetch.concurrency": workers,
            "prefetch.batches": depth,
            "errors.on_bad_sample": policy,
            **extra,
        }
        found = []
        for executor in ("thread", "process"):
            more = {**overrides, "prefetch.executor": executor}
            with loaderkit.build(made, overrides=more, rank=1, world_size=3) as loader:
                found.append([contents(one) for _ in range(2) for one in loader])
        assert found[0] == found[1]

    def test_breaks_resumes_and_epochs(self, rng: random.Random) -> None:
        with loaderkit.build(numbers(), overrides={"prefetch.executor": "inline"}) as plain:
            expected = [batch["x"].tolist() for batch in plain]
        with build(numbers()) as loader:
            for _ in range(40):
                begin, length = rng.randrange(8), rng.randrange(1, 5)
                loader.load_state_dict({**loader.state_dict(), "epoch": rng.randrange(3), "position": begin * 8})
                seen = []
                for batch in loader:
                    seen.append(batch["x"].tolist())
                    if len(seen) == length:
                        break
                assert seen == expected[begin : begin + length]
            memory = loader.stats().memory
            assert memory["open_bytes"] // memory["slab_bytes"] <= 4  # texts count as well, a few bytes
            assert memory["allocated_bytes"] <= 8 * memory["slab_bytes"]

    def test_a_seek_while_it_starts(self) -> None:
        with build(numbers().shuffle(seed=5)) as loader, loaderkit.build(numbers().shuffle(seed=5)) as plain:
            loader.start()
            for one in (plain, loader):
                one.set_epoch(2)
            assert [batch["x"].tolist() for batch in loader] == [batch["x"].tolist() for batch in plain]
            assert loader.epoch == 2

    def test_what_comes_anyway_is_not_read_again(self) -> None:
        with build(numbers(), **{"prefetch.batches": 8}) as loader:
            for epoch in range(3):
                loader.set_epoch(epoch)
                for _ in loader:
                    pass
            assert loader.stats().stages[0].num_items <= 3 * 64 + 8 * 8

    def test_dropped_loaders_leave_nothing(self) -> None:
        def once() -> None:
            for _ in build(numbers()):
                break

        before = resources()
        for _ in range(2):
            once()
            assert resources() == before

    def test_closing_while_another_thread_waits(self) -> None:
        pipeline = Pipeline.dataset(Numbers()).shuffle("none").read().call(hang, thread_safe=True).batch(8)
        with executor_of(pipeline, **PROCESS) as engine:
            raised: list[BaseException] = []
            has_two = threading.Event()

            def consume() -> None:
                for _ in range(2):
                    engine.next()
                has_two.set()
                try:
                    engine.next()  # its sample 20 hangs
                except ClosedError as error:
                    raised.append(error)

            thread = threading.Thread(target=consume)
            thread.start()
            assert has_two.wait(120)
            engine.close(join_s=0.1)
            thread.join(30)
            assert len(raised) == 1
            raised.clear()


def shake(sample: dict[str, Any], rng: Any) -> None:
    if sample["x"] in (7, 33):
        raise ArithmeticError(sample["text"])
    sample["noise"] = torch.from_numpy(rng.random(1500))
    sample["ragged"] = torch.arange(1 + sample["x"])


def contents(batch: dict[str, Any]) -> list[Any]:
    return [(name, value.tolist() if isinstance(value, torch.Tensor) else value) for name, value in batch.items()]


class TestMemory:
    def test_batches_outlive_the_loader(self, caplog: pytest.LogCaptureFixture) -> None:
        """Kept batches are kept, with one warning, and stay readable and writable when the process is gone."""
        with caplog.at_level(logging.WARNING), build(numbers(64, 1)) as loader:
            batches = list(loader)
        assert len([record for record in caplog.records if "still referenced" in record.getMessage()]) == 1
        del loader
        gc.collect()
        for number, batch in enumerate(batches):
            assert batch["filling"].tolist() == [[number] * 1000]
            assert batch["text"] == [f"number {number}"]
            batch["filling"] += 1
        assert len({batch["filling"].data_ptr() for batch in batches}) == 64

    @pytest.mark.parametrize("way", ["taken", "give_back"])
    def test_a_hundred_thousand_batches_dropped_at_once(self, way: str) -> None:
        """Their numbers do not fit into one message."""
        arena = SharedArena.create()
        lease_table = LeaseTable(arena)
        block = Allocator(arena).take(1)
        for number in range(1 << 30, (1 << 30) + 100_000):
            lease_table.lend(number, (block,))
        told: list[list[int]] = []
        sizes: list[int] = []

        def tell(name: str, numbers: list[int]) -> None:
            told.append(numbers)
            sizes.append(len(pickle.dumps((name, numbers), 5)))

        connection: Any = SimpleNamespace(tell=tell)
        getattr(Receiver(connection, lease_table), way)()
        assert sorted(number for numbers in told for number in numbers) == [*range(1 << 30, (1 << 30) + 100_000)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            assert max(sizes) < end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        lease_table.close()
        arena.release_descriptor()

    def test_memory_is_used_again(self) -> None:
        with build(numbers(), **{"prefetch.batches": 2}) as loader:
            addresses = {batch["filling"].data_ptr() for _ in range(6) for batch in loader}
            memory = loader.stats().memory
        assert len(addresses) <= 4
        assert memory["allocated_bytes"] <= 4 * memory["slab_bytes"]

    def test_no_more_is_read_ahead_than_asked_for(self) -> None:
        """What has arrived here and was not taken counts as well."""
        with build(numbers(), **{"prefetch.batches": 3}) as loader:
            next(iter(loader))
            wait_for(lambda: loader.stats().stages[-1].blocked_s > 0)
            slab_bytes = loader.stats().memory["slab_bytes"]
            wait_for(lambda: loader.stats().memory["open_bytes"] // slab_bytes == 3)
            assert loader.stats().stages[0].num_items <= 8 * 4 + 1

    def test_fields_share_no_version_counter_and_are_aligned(self) -> None:
        with build(numbers()) as loader:
            batch = next(iter(loader))
        assert all(batch[name].data_ptr() % 64 == 0 for name in ("x", "filling"))
        before = batch["filling"]._version
        batch["x"] += 1
        assert batch["filling"]._version == before

    def test_less_than_one_batch_names_the_minimum(self) -> None:
        with (
            pytest.raises(ConfigError, match="one batch of 8 takes"),
            build(numbers(), **{"prefetch.memory": "1KiB"}) as loader,
        ):
            next(iter(loader))
