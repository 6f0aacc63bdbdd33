"""What the engine over several processes needs of each process, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loaderkit._internal.cuda.device import Device
from loaderkit.engine.metrics.nodes.ledger import NodeLedger
from loaderkit.engine.metrics.snapshot import StageStats
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.restarts import Death
from loaderkit.engine.watchdog import HangReport
from loaderkit.engine.work import Stage
from loaderkit.sampling.shard import Shard


@dataclass(frozen=True)
class WorkerSpec:
    """What each process runs. `make_engine` is pickled and called there with an allocator of slabs and the process's shard;
    `preload` is its module, imported while the spec is sent. `trainer_stages` run in this process, on received batches.
    `rows` are the stages that run there, with the workers of one process; `pools` says which of them share workers."""

    make_engine: Any
    preload: str
    rows: Sequence[StageStats]
    pools: Sequence[Sequence[str]]
    num_batches: int  # read ahead, by all processes together
    memory_bytes: int  # of all processes
    scaled_stages: Collection[str] = ()  # of which each process has as many workers, however many there are
    trainer_stages: Sequence[Stage] = ()
    pinned_for: Device | None = None  # to which the trainer's stages copy
    ledger: NodeLedger | None = None  # counts what comes from which node, where processes may be on several
    free: Callable[[], None] | None = None  # frees what all processes share, once they have ended


@dataclass
class ReceivedBatch:
    """A batch that has arrived, and the number of seeks before it was sent."""

    generation: int
    batch: Delivered


class Inbox(Protocol):
    """What the consumer takes batches from: the connection itself, or a thread that runs stages on them first."""

    def take(self, generation: int, timeout_s: float) -> ReceivedBatch | None:
        """The next batch of `generation` or a later one; None if none comes in time. Raises the error that stopped the other
        process, and EOFError if it has ended."""

    def taken(self) -> None:
        """Tell the other process that a batch has left the budget, and which ones are no longer referenced."""

    def give_back(self) -> None:
        """Tell the other process which batches are no longer referenced."""

    def report(self) -> HangReport | None:
        """Why the next batch is not ready, if that is known without asking the other process."""

    def close(self, join_s: float) -> None:
        """Drop received batches; a thread that does not end within `join_s` is left behind. The connection is closed."""


class RunningProcess(Protocol):
    """One process, from before its start to its end. `tell` and `ask` may be called from any thread."""

    def start(self, next_position: tuple[int, int], generation: int, orders: Sequence[tuple[Any, ...]]) -> None:
        """Start it and send its spec; it imports modules meanwhile. `generation` is the number of seeks so far; `orders` are
        commands that it obeys before it makes a batch. Raises WorkerDiedError if it cannot be started, and ConfigError; `close`
        releases what was started."""

    @property
    def pid(self) -> int | None:
        """None while it is not known."""

    @property
    def node(self) -> str | None:
        """The machine it runs on, if that may be another one, and is known."""

    @property
    def where(self) -> str:
        """Its pid, and its node if it runs on another machine; for messages."""

    @property
    def inbox(self) -> Inbox:
        """Its batches, once it is started; `take` is called from one thread at a time."""

    @property
    def is_awake(self) -> bool:
        """True once it answers. Until then it imports, and has no answers and no work to finish."""

    @property
    def has_ended(self) -> bool:
        """True if it was started and has ended; batches of it may be left to take."""

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a command; ignored once it has ended."""

    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer to a question; None if it has none yet, has ended or does not answer in time."""

    def death(self) -> Death:
        """How it has ended by itself."""

    def begin_closing(self, join_s: float) -> None:
        """Tell the process to end within `join_s`, without waiting for its end."""

    def close(self, join_s: float) -> None:
        """Wait for its end, and end it by force after `join_s`; delivered batches stay valid."""

    def release(self) -> None:
        """Free what it leaves, except batches that are referenced; it is closed, and so is its inbox."""


MakeProcess = Callable[[WorkerSpec, Shard], RunningProcess]
"""Makes a process that is not started."""
