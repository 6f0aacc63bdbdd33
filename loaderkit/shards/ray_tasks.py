"""Makes shards on a Ray cluster, each as a task that is tried again if its worker or node dies. The only module of this
package that imports ray."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from loaderkit.engine.ray.surroundings import Surroundings
from loaderkit.errors import LoaderkitError, MissingExtraError, WorkerDiedError
from loaderkit.shards.job import ShardJob, make_shard, pack_job, unpack_job
from loaderkit.shards.workers import MadeShard

_RETRIES = 3
_CANCEL_S = 30.0


def make_on_ray(
    job: ShardJob, numbers: Sequence[int], address: str, num_at_once: int | None
) -> Generator[MadeShard, None, None]:
    """Make shards on the cluster at `address`, as in `prefetch.ray`, one CPU each; `num_at_once`:
    None for as many as it has CPUs. Raises MissingExtraError, ConfigError, WorkerDiedError."""
    ray, connect = _imported()
    is_ours = not ray.is_initialized()
    connect(address)
    try:
        yield from _made(ray, job, numbers, num_at_once)
    finally:
        if is_ours:
            ray.shutdown()


def _imported() -> tuple[Any, Callable[[str], None]]:
    try:
        import ray

        from loaderkit.engine.ray.cluster import connect
    except ImportError as error:
        raise MissingExtraError(f"--ray needs the package ray ({error}): pip install 'loaderkit[ray]'") from error
    return ray, connect


def _made(ray: Any, job: ShardJob, numbers: Sequence[int], num_at_once: int | None) -> Generator[MadeShard, None, None]:
    num = num_at_once or max(1, int(ray.cluster_resources().get("CPU", 1)))
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_make)
    packed, surroundings = ray.put(pack_job(job)), Surroundings.here()
    waiting = list(reversed(numbers))
    running: dict[Any, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num:
                number = waiting.pop()
                running[task.remote(packed, surroundings, number)] = number
            finished, _ = ray.wait(list(running))
            for reference in finished:
                number = running.pop(reference)
                try:
                    made = ray.get(reference)
                except (ray.exceptions.WorkerCrashedError, ray.exceptions.RayError) as error:
                    raise WorkerDiedError(
                        f"shard {number} of {job.num_shards}: its Ray task failed {_RETRIES + 1} times or cannot be run: "
                        f"{str(error).splitlines()[0]}. The shards that are done stay: run it again, and it goes on"
                    ) from error
                if isinstance(made, LoaderkitError):
                    raise made
                yield made
    finally:
        for reference in running:
            ray.cancel(reference)  # raises KeyboardInterrupt in the task, which then leaves nothing
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=_CANCEL_S)


def _make(packed: bytes, surroundings: Surroundings, number: int) -> MadeShard | LoaderkitError:
    """On a worker of Ray: the shard, or the error."""
    surroundings.enter()
    try:
        return MadeShard(number, make_shard(unpack_job(packed), number, lambda *_: None))
    except LoaderkitError as error:
        return error
