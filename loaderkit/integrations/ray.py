"""Ray Data as a source: the rows of a `ray.data.Dataset`, in Ray Data's order.

    from loaderkit.integrations.ray import RayRows
    pipeline = loaderkit.Pipeline.iterable(RayRows(dataset), length=dataset.count()).read().batch(64)

Ray Data executes the data set; loaderkit makes batches of its rows, with saved states, accounts and the later stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from loaderkit.errors import ConfigError, MissingExtraError, SourceError

logger = logging.getLogger("loaderkit")
_PRESERVE = (
    "set `ray.data.DataContext.get_current().execution_options.preserve_order = True` before the data set is made"
)


class RayRows:
    """The rows of a `ray.data.Dataset` for `Pipeline.iterable`: dicts of NumPy arrays and scalars, strings and bytes.

    The order is Ray Data's, which may differ each time unless `preserve_order` of its options is set. A state holds the
    number of rows and a hash of them: the data set is executed again up to there, and if the rows are others, that is an error.

    It is read by one process, which is connected to Ray, for one rank. Several ranks read a shard each: `RayRows(shard)` of
    `dataset.streaming_split(n, equal=True)` or `ray.train.get_dataset_shard(name)`, with `build(..., rank=0, world_size=1)`.
    Ray deals shards anew each time, so a state within an epoch of one is refused.
    """

    def __init__(self, dataset: Any) -> None:
        """`dataset` is a Dataset, a DataIterator, or a function that makes one from the number of an epoch. Raises
        ConfigError."""
        if not hasattr(dataset, "iter_batches") and not callable(dataset):
            raise ConfigError(
                f"RayRows: a ray.data.Dataset, a shard of one, or a function of the epoch, not {type(dataset).__name__}"
            )
        self._dataset = dataset
        self._epoch = 0
        self._saved: Mapping[str, Any] = {"rows": 0}
        self._num_rows = 0
        self._hash = xxhash.xxh3_64()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises SourceError if the rows differ from those that the loaded state has counted."""
        dataset = self._opened()
        saved, self._saved = self._saved, {"rows": 0}
        self._num_rows, self._hash = 0, xxhash.xxh3_64()
        for batch in dataset.iter_batches(batch_size=None, batch_format="numpy"):
            columns = list(batch.items())
            for values in zip(*(column for _, column in columns), strict=True):
                row = {name: value for (name, _), value in zip(columns, values, strict=True)}
                _add(self._hash, values)
                self._num_rows += 1
                if self._num_rows > saved["rows"]:
                    yield row
                elif self._num_rows == saved["rows"] and self._hash.hexdigest() != saved["hash"]:
                    raise SourceError(
                        f"the first {self._num_rows} rows of Ray Data are not those that were delivered before the state was "
                        f"taken, so samples would be repeated and left out. For the same order each time, {_PRESERVE}, and "
                        "shuffle it by the epoch: `RayRows(lambda epoch: data.random_shuffle(seed=epoch))`. A shard of "
                        "streaming_split has another order each time"
                    )
        if self._num_rows < saved["rows"]:
            raise SourceError(f"Ray Data has {self._num_rows} rows now, and {saved['rows']} were delivered")

    def set_epoch(self, epoch: int) -> None:
        """Of the next iteration."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Behind the last row."""
        return {"rows": self._num_rows, "hash": self._hash.hexdigest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """For the next iteration."""
        self._saved = dict(state)

    def check_readers(self, world_size: int, num_processes: int) -> None:
        """Raise ConfigError unless one process reads it, as each would execute all of it; warn if the order may change."""
        if world_size > 1:
            raise ConfigError(
                f"source.object: each of {world_size} ranks would execute the whole of Ray Data's data set, in an order that "
                "may be another one on each. Give each rank its shard, RayRows(dataset.streaming_split(n, equal=True)[rank]) "
                "or RayRows(ray.train.get_dataset_shard(name)), and build with rank=0 and world_size=1"
            )
        if num_processes > 1:
            raise ConfigError(
                f"prefetch.processes: {num_processes} of them cannot read Ray Data's data set, which Ray's own workers make: "
                "leave it at 1"
            )

        context = getattr(self._dataset, "context", None)
        if context is not None and not context.execution_options.preserve_order:
            logger.warning(
                "Ray Data may give its rows in another order each time, and a state within an epoch is then refused: %s",
                _PRESERVE,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> RayRows:
        """For another pass: a Dataset describes what is executed, and does not change."""
        return RayRows(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("Ray Data is read by the process that is connected to Ray")

    def _opened(self) -> Any:
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError('RayRows needs Ray Data: pip install "ray[data]"') from error
        if not ray.is_initialized():
            raise SourceError(
                "this process is not connected to Ray, and reading would start a cluster of its own: call ray.init() first, "
                "and use `executor: thread`"
            )
        is_made = not hasattr(self._dataset, "iter_batches")
        return self._dataset(self._epoch) if is_made else self._dataset


def _add(digest: Any, value: Any) -> None:
    """Hash a value of a row."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        digest.update(np.ascontiguousarray(value))
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, (list, tuple, np.ndarray)):
        for item in value:
            _add(digest, item)
    elif isinstance(value, Mapping):
        for item in value.items():
            _add(digest, item)
    else:
        digest.update(str(value).encode())
