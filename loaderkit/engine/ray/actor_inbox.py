"""Receives the batches of an actor, in order: it keeps calls for batches outstanding, and a thread fetches what they return.

    taken() ──next──> actor ──batch──> object store ──fetch──> queue ──> take()

As many calls are outstanding as the actor may have batches finished or in work, up to 16, so a finished one goes straight into
the store of its node. The thread brings it to this node, if that is another one, before its turn. A call also says how many
batches were taken since the last one, as a message of its own would cost as much as the call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from ray.exceptions import RayError, RayTaskError

from loaderkit._internal.config import keys
from loaderkit._internal.packing import unpack
from loaderkit.engine.metrics.nodes.ledger import NodeLedger
from loaderkit.engine.metrics.stalls import NETWORK, WaitSegment
from loaderkit.engine.ray.actor import MOST_CALLS
from loaderkit.engine.ray.clock_offset import batch_here, measure
from loaderkit.engine.ray.cluster import cpus_of
from loaderkit.engine.ray.connection import Connection
from loaderkit.engine.ray.messages import Hello, PackedBatch
from loaderkit.engine.ray.missing_files import name_node
from loaderkit.engine.ray.object_memory import ObjectMemory
from loaderkit.engine.ray.surroundings import boot_id
from loaderkit.engine.remote.contracts import ReceivedBatch
from loaderkit.engine.remote.delivery import Delivered
from loaderkit.engine.remote.error_transport import PackedError, unpack_error
from loaderkit.engine.watchdog import HangReport
from loaderkit.errors import ClosedError, ConfigError

_LOOK_S = 1.0  # between checks for the end
_Arrived = ReceivedBatch | BaseException


class ActorInbox:
    """An `Inbox`. All methods but `close` belong to the consumer's thread, or to the thread that takes batches for it."""

    def __init__(
        self,
        actor: Any,
        memory: ObjectMemory,
        ledger: NodeLedger,
        generation: int,
        num_batches: int,
        *,
        connection: Connection,
        why_not_placed: Callable[[], str],
        relay_logs: Callable[[], None],
    ) -> None:
        """`num_batches` is the actor's share of the batches read ahead. `why_not_placed` explains why it has no node
        yet; `relay_logs` logs what it has logged, if that is anything."""
        self._connection = connection
        self._actor = actor
        self._memory = memory
        self._ledger = ledger
        self._generation = generation
        self._num_batches = num_batches
        self._num_asked = 0
        self._num_outstanding = 0  # batches of this generation that were asked for and are not taken yet
        self._num_untold = 0  # batches of this generation that were taken, and the actor does not know it yet
        self._num_told = 0  # commands
        self._untaken: deque[int] = deque()  # generations of batches that left `take` and have not been taken
        self._why_not_placed = why_not_placed
        self._relay_logs = relay_logs
        self._refs: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._arrived: SimpleQueue[_Arrived] = SimpleQueue()
        self._asking = threading.RLock()  # a signal's handler may close the loader within a call
        self._is_closed = False
        self.hello: Hello | None = None
        self.has_begun = False  # the actor has an engine, or has failed to make one
        self.offset_s = 0.0  # of the actor's clock
        self.lost: BaseException | None = None  # what Ray said of the actor's end
        self._thread: threading.Thread | None = None
        self._ask_for_batches()

    def start(self, begun: Any) -> None:
        """Fetch batches, once `begun`, the call that makes the actor's engine, has returned."""
        self._thread = threading.Thread(target=self._fetch, args=(begun,), name="loaderkit-fetch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- asking

    def _ask_for_batches(self) -> None:
        with self._asking:
            while self._num_outstanding < min(self._num_batches, MOST_CALLS) and not self._is_closed:
                asked = (self._num_asked, self._generation, self._num_untold, self._num_told)
                ref = self._connection.do(self._actor.next.remote, *asked)
                self._refs.put((self._generation, ref))
                self._num_asked += 1
                self._num_outstanding += 1
                self._num_untold = 0

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a command; from any thread. A call for a batch never overtakes it. A call that reports a taken batch
        makes room for another one, and before the actor knows of `redeal`, that could be a batch that is no longer its
        own."""
        with self._asking:
            self._connection.do(self._actor.tell.remote, name, *arguments)
            self._num_told += 1

    def seek(self, generation: int) -> None:
        """Ask for batches from after a seek. Batches from before it that the actor still makes are dropped."""
        with self._asking:
            self._generation = generation
            self._num_outstanding = self._num_untold = 0
        self._ask_for_batches()

    def set_depth(self, num_batches: int) -> None:
        """Set the actor's share of the batches read ahead; from any thread."""
        self._num_batches = num_batches
        self._ask_for_batches()

    # ------------------------------------------------------------------------------------------------- the consumer

    def take(self, generation: int, timeout_s: float) -> ReceivedBatch | None:
        """See `Inbox`; raises ClosedError once the memory of batches that have arrived is gone with the connection."""
        self._connection.check()
        deadline = time.monotonic() + timeout_s
        self._relay_logs()
        while True:
            try:
                arrived = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return None
            if isinstance(arrived, BaseException):
                self._arrived.put(arrived)
                raise arrived
            if arrived.generation >= generation:
                self._untaken.append(arrived.generation)
                return arrived
            del arrived  # made before the last seek

    def taken(self) -> None:
        """See `Inbox`."""
        if self._is_closed:
            return
        generation = self._untaken.popleft()
        with self._asking:
            if generation == self._generation:  # otherwise a seek has taken it out of the budget
                self._num_outstanding -= 1
                self._num_untold += 1
        self._ask_for_batches()
        with self._asking:  # if nothing was asked for, as there are to be fewer, the actor waits for this
            num_untold, self._num_untold = self._num_untold, 0
        if num_untold:
            self.tell("taken", generation, num_untold)

    def give_back(self) -> None:
        """Nothing to tell: an actor keeps no memory of batches that have arrived."""

    def report(self) -> HangReport | None:
        """See `Inbox`."""
        if self.hello is None and self.lost is None:
            return HangReport(self._why_not_placed(), "start")
        return None

    def end(self) -> None:
        """Note that the actor has ended: what was asked for before may still come. From any thread."""
        self._refs.put(None)

    def close(self, join_s: float) -> None:
        """See `Inbox`."""
        with self._asking:
            self._is_closed = True
        self.end()
        if self._thread is None:
            self._drop_refs()
        elif self._thread is not threading.current_thread():
            self._thread.join(join_s)
        while not self._arrived.empty():
            self._arrived.get()
        self._arrived.put(EOFError())

    # ------------------------------------------------------------------------------------------------- fetching

    def _fetch(self, begun: Any) -> None:
        """Fetch batches in the order in which they were asked for, until the actor's end."""
        try:
            self._meet()
            refused = self._begin(begun)
            del begun
            if refused is not None:
                self._arrived.put(refused)
                return
            while (asked := self._refs.get()) is not None:
                generation, ref = asked
                del asked
                if generation < self._generation:
                    continue
                arrived = self._received(generation, self._get(ref))
                del ref
                if arrived is not None:
                    self._arrived.put(arrived)
                del arrived  # otherwise the thread would keep a batch's memory while it waits for the next
            self._arrived.put(EOFError())
        except EOFError:
            self._arrived.put(EOFError())
        except (RayTaskError, ClosedError) as error:
            self._arrived.put(error.with_traceback(None))  # whose frames would hold a reference to an object
        except RayError as error:
            self.lost = error.with_traceback(None)
            self._arrived.put(EOFError())
        except BaseException as error:
            self._arrived.put(error)
        finally:
            self._drop_refs()

    def _meet(self) -> None:
        hello: Hello = self._get(self._connection.do(self._actor.hello.remote))
        if hello.boot_id == boot_id():
            self.hello = hello  # the same clock: nothing has to be known before it is asked
        self._ledger.placed(hello.node, self._connection.do(cpus_of, hello.node))
        trip_s, ahead_s = measure(
            lambda: float(self._get(self._connection.do(self._actor.clock.remote))), time.perf_counter
        )
        self._ledger.round_trip(hello.node, trip_s)
        if self.hello is None:
            self.offset_s, self.hello = ahead_s, hello

    def _begin(self, begun: Any) -> ConfigError | None:
        """Let the engine run; the error, if the actor could not read what it was sent. No batch is made before it is
        known here that there is an engine: else an actor that dies of its first batch would be taken for one that could
        not begin."""
        try:
            self._get(begun)
        except RayTaskError as error:
            return ConfigError(
                f"{keys.EXECUTOR}: ray: {self.where} cannot read what it was sent ({type(error).__name__}: {error}): install "
                "the same versions of Python, Ray and loaderkit on all nodes"
            )
        self.has_begun = True
        self.tell("start")
        return None

    def _get(self, ref: Any) -> Any:
        # Not in ray.wait: a thread in there when the program calls ray.shutdown() ends it by a segmentation fault.
        future = self._connection.do(ref.future)
        while not self._is_closed:
            self._connection.check()
            done, _ = wait([future], _LOOK_S)
            if done:
                return future.result()
        raise EOFError

    def _received(self, generation: int, answer: PackedBatch | PackedError | None) -> _Arrived | None:
        if answer is None:
            if generation < self._generation:
                return None  # a seek came in between
            raise EOFError
        if isinstance(answer, PackedError):
            return unpack_error(answer, self.where)
        arrived_s = time.perf_counter()
        record: Delivered = unpack(answer.stream, [self._memory.open(buffer) for buffer in answer.buffers])
        batch = batch_here(name_node(record.unsealed(self.where), self.where), self.offset_s)
        num_bytes = len(answer.stream) + sum(buffer.nbytes for buffer in answer.buffers)
        return ReceivedBatch(answer.generation, self._counted(batch, num_bytes, arrived_s))

    def _counted(self, batch: Delivered, num_bytes: int, arrived_s: float) -> Delivered:
        """The batch, with its way here as the last part of its path if that was a network."""
        assert self.hello is not None
        if batch.is_end:
            return batch
        self._ledger.arrived(self.hello.node, num_bytes, batch.done_s, arrived_s)
        if not self._ledger.is_away(self.hello.node) or arrived_s <= batch.done_s:
            return batch
        way = WaitSegment(batch.done_s, arrived_s, NETWORK)
        return replace(batch, done_s=arrived_s, segments=[*batch.segments, way])

    @property
    def where(self) -> str:
        """The actor, in messages."""
        return f"the actor that loads ({'not placed yet' if self.hello is None else say_place(self.hello)})"

    def _drop_refs(self) -> None:
        while True:
            try:
                self._refs.get_nowait()
            except Empty:
                return


def say_place(hello: Hello) -> str:
    """Where an actor runs, for messages."""
    return f"pid {hello.pid} on node {hello.node}"
