"""The iterator over an epoch, and its batches by number, in the form in which other libraries expect the parts of a
DataLoader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, NoReturn

from loaderkit.errors import LoaderkitError
from loaderkit.pipeline.config.model import PipelineConfig


class BatchesByNumber:
    """`loader.dataset`: as long as there are samples, and a DataLoader over it gets batches by their numbers."""

    def __init__(self, num_samples: Callable[[], int], rest_from: Callable[[int], Iterator[Any]]) -> None:
        """`rest_from(number)` iterates over the next epoch from that batch on."""
        self._num_samples = num_samples
        self._rest_from = rest_from
        self._rest: Iterator[Any] = iter(())
        self._number = -1  # of the next batch of `_rest`

    def __len__(self) -> int:
        """The number of samples, over all ranks."""
        return self._num_samples()

    def __getitems__(self, number: int) -> Any:
        """The batch with this number. Consecutive numbers belong to one iteration; any other number begins the next
        epoch at that batch."""
        if number != self._number:
            self._rest, self._number = self._rest_from(number), number
        self._number += 1
        return next(self._rest)


class BatchNumbers:
    """`loader.batch_sampler`: the numbers of an epoch's batches; through it other loops tell the loader its epoch."""

    def __init__(self, num_batches: Callable[[], int], set_epoch: Callable[[int], None]) -> None:
        """`num_batches` raises TypeError if their number is not known before the end."""
        self._num_batches = num_batches
        self.set_epoch = set_epoch  # the loader's

    @property
    def sampler(self) -> BatchNumbers:
        """This object itself: Lightning looks there for `set_epoch`."""
        return self

    def __len__(self) -> int:
        return self._num_batches()

    def __iter__(self) -> Iterator[int]:
        try:
            return iter(range(self._num_batches()))
        except TypeError:
            return count()  # until `BatchesByNumber` ends with the epoch


class NextCall:
    """Knows whether `next` of a loader is running: with two threads in it at once, some batches would come twice."""

    is_running = False


class EpochIterator(Iterator[Any]):
    """An iterator over the rest of an epoch; `next_of(num_left)` gives the next batch and how many are left then."""

    def __init__(
        self,
        next_call: NextCall,
        next_of: Callable[[int | None], tuple[Any, int]],
        num_to_come: Callable[[], int],
        check_length: Callable[[], None],
    ) -> None:
        """`next_call` is one for all iterators of a loader. `check_length` raises TypeError if the number left is not known."""
        self._next_call = next_call
        self._next_of = next_of
        self._num_to_come = num_to_come
        self._check_length = check_length
        self._num_left: int | None = None  # None if it has not begun

    def __len__(self) -> int:
        """The number of batches left, also of a resumed epoch."""
        self._check_length()
        return self._num_to_come() if self._num_left is None else self._num_left

    def __next__(self) -> Any:
        if self._next_call.is_running:
            raise LoaderkitError(
                "this loader is being asked for a batch already, by another thread or by code that makes that batch: one "
                "thread at a time iterates over a loader, and hands the batches on to the others (by a queue.Queue, say)"
            )
        # Threads are switched, and KeyboardInterrupt is raised, only at calls: there is none between the check and
        # `finally`.
        try:
            self._next_call.is_running = True
            batch, self._num_left = self._next_of(self._num_left)
        except BaseException:
            self._num_left = 0
            raise
        finally:
            self._next_call.is_running = False
        return batch


class DataLoaderParts(ABC):
    """What other loops ask a DataLoader for, as far as a loader has it. `sampler` and `prefetch_factor` are None."""

    sampler: None = None  # there is none to replace: the loader has its order and its ranks
    prefetch_factor: None = None  # as a DataLoader without processes has it, such as the one over `dataset`

    @property
    @abstractmethod
    def config(self) -> PipelineConfig: ...

    @property
    @abstractmethod
    def num_samples(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def set_epoch(self, epoch: int) -> None: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _rest_from(self, number: int) -> Iterator[Any]:
        """The next epoch without the first `number` batches."""

    @property
    def batch_size(self) -> int | None:
        """The number of samples of a whole batch on this rank; None with `batch: {tokens: N}`, as for a `batch_sampler`."""
        return self.config.batch_size

    @property
    def dataset(self) -> BatchesByNumber:
        """Its `len` is the number of samples. It gives no samples, but batches to the DataLoader that
        `accelerate.skip_first_batches(loader, num)` makes, also in the Trainer of transformers."""
        return BatchesByNumber(lambda: self.num_samples, self._rest_from)

    @property
    def batch_sampler(self) -> BatchNumbers:
        """The numbers of an epoch's batches, for that DataLoader; its `set_epoch`, which Lightning calls, is the loader's."""
        return BatchNumbers(self.__len__, self.set_epoch)

    @property
    def drop_last(self) -> NoReturn:
        """Raises AttributeError on purpose, so that `accelerate.data_loader.prepare_data_loader`, which would shard the
        batches again, ends."""
        raise AttributeError(
            "a Loader has no drop_last, which prepare_data_loader asks for: its batches are this rank's already, and would be "
            "sharded twice. Iterate over the loader itself (`Accelerator.prepare` returns it as it is), and let "
            "`transfer: {device: auto}` bring its batches to the device"
        )

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """The batch: it is whole already."""
        return batch
