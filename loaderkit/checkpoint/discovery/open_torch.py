"""Opens files of torch.save: one, shards with an index, or the folder of a ZeRO run of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from loaderkit._internal.garbage import collector_off
from loaderkit.checkpoint.contents import Checkpoint, TensorEntry, TensorShard
from loaderkit.checkpoint.discovery.detect import CheckpointFiles, Fetch, heads_of
from loaderkit.checkpoint.discovery.opened_files import check_index, indexed_names, reader_in, require_new
from loaderkit.checkpoint.formats import deepspeed, torch_zip
from loaderkit.checkpoint.names import Leaf, flatten, opaque_in
from loaderkit.checkpoint.structure import collect
from loaderkit.connectors.base import ByteRange, ObjectInfo, traits_of
from loaderkit.errors import CheckpointError, FormatError

_NUM_AT_ONCE = 16  # files whose descriptions are read at the same time in a store that one waits for


def open_torch(checkpoint: Checkpoint, chosen: CheckpointFiles, fetch: Fetch, *, is_single: bool) -> None:
    """Add the contents of one file, or of the shards that an index names; `is_single`: a file that was asked for by its name.
    Raises CheckpointError, FormatError."""
    files, indexed = chosen.files, indexed_names(checkpoint, chosen, ".bin")
    if indexed is None and len(files) > 1:
        raise CheckpointError(
            f"{checkpoint.name} holds {len(files)} torch.save files ({', '.join(files[:4])}) and no index that says how they "
            "belong together: name the one that is meant"
        )
    for name in files if indexed is None else indexed:
        info = checkpoint.objects[name]
        try:
            archive = _archive(checkpoint, info, chosen.heads.pop(info.key), fetch)
            leaves = flatten(
                archive.value, _is_view, max(1000, archive.num_pickled), seen=collect(checkpoint.containers)
            )
        except (FormatError, CheckpointError) as error:
            raise type(error)(f"{checkpoint.describe(info.key)}: {error}") from None
        if not is_single and indexed is None and deepspeed.lacks_parts(name, archive.value):
            raise CheckpointError(
                f"{checkpoint.name} is not whole: it has {name}, of ZeRO, and no zero_pp_rank_*_optim_states.pt with the "
                "optimizer and the weights in fp32. Name that file to restore its weights, which are rounded"
            )
        if indexed is not None:
            leaves = {own: leaf for own, leaf in leaves.items() if own in indexed[name]}
        _add_leaves(checkpoint, info, leaves, partial(entry_of, archive.starts, info.key))
    check_index(checkpoint, indexed)


def open_deepspeed(checkpoint: Checkpoint, chosen: CheckpointFiles, fetch: Fetch) -> None:
    """Add the merged contents of all ranks' files. Raises CheckpointError, FormatError."""
    num_pickled: list[int] = []

    def read(name: str) -> deepspeed.RankFile:
        info = checkpoint.objects[name]
        try:
            archive = _archive(checkpoint, info, chosen.heads.pop(info.key), fetch)
        except FormatError as error:
            raise FormatError(f"{checkpoint.describe(info.key)}: {error}") from None
        num_pickled.append(archive.num_pickled)
        return deepspeed.RankFile(archive.value, partial(entry_of, archive.starts, info.key))

    def read_all(names: Sequence[str]) -> list[deepspeed.RankFile]:
        at_once = _NUM_AT_ONCE if traits_of(checkpoint.connector).is_remote else 1
        with ThreadPoolExecutor(at_once, thread_name_prefix="loaderkit-open") as pool:
            try:
                return [*pool.map(read, names)]
            finally:
                pool.shutdown(cancel_futures=True)

    models = [name for name in chosen.files if deepspeed.MODEL_FILE.fullmatch(name)]
    parts = [name for name in chosen.files if name not in models]
    try:
        saved = read_all(models[:1])
        saved += read_all(deepspeed.with_frozen(saved[0], models, len(parts)))
        state = deepspeed.merge(saved, read_all(parts))
        leaves = flatten(state, _is_tensor, max(1000, 8 * sum(num_pickled)), seen=collect(checkpoint.containers))
    except (FormatError, CheckpointError) as error:
        raise type(error)(f"{checkpoint.name}, of DeepSpeed: {error}") from None
    _add_leaves(checkpoint, checkpoint.objects[models[0]], leaves, saved[0].place)


def open_common(checkpoint: Checkpoint, info: ObjectInfo, fetch: Fetch) -> None:
    """Add what Megatron saves beside a checkpoint of torch.distributed.checkpoint. What only its code could make, such
    as the program's arguments, is named in `beside` and left out. Raises CheckpointError, FormatError."""
    (head,) = heads_of([info], fetch).values()
    name = info.key[len(checkpoint.prefix) :]
    try:
        archive = _archive(checkpoint, info, head, fetch)
        leaves = flatten(archive.value, _is_view, max(1000, archive.num_pickled), seen=collect(checkpoint.containers))
    except (FormatError, CheckpointError) as error:
        raise type(error)(f"{checkpoint.describe(info.key)}: {error}") from None
    opaque = [own for own, leaf in leaves.items() if opaque_in(leaf.value) is not None]
    checkpoint.beside[:] = [f"{name}: {own}" for own in opaque] + [one for one in checkpoint.beside if one != name]
    plain = {own: leaf for own, leaf in leaves.items() if own not in opaque}
    _add_leaves(checkpoint, info, plain, partial(entry_of, archive.starts, info.key))


def _archive(checkpoint: Checkpoint, info: ObjectInfo, head: bytes, fetch: Fetch) -> torch_zip.Archive:
    def fetch_here(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return fetch([ByteRange(info.key, start, length, info.etag) for start, length in ranges])

    checkpoint.read.add(info.key)
    return torch_zip.read_archive(reader_in(checkpoint, info, head), info.size, fetch_here)


@collector_off()
def _add_leaves(
    checkpoint: Checkpoint, info: ObjectInfo, leaves: dict[str, Leaf], place: Callable[[torch_zip.View], TensorEntry]
) -> None:
    for name, leaf in leaves.items():
        require_new(checkpoint, name, info)
        checkpoint.paths[name] = leaf.path
        if isinstance(leaf.value, TensorEntry):
            checkpoint.tensors[name] = leaf.value
        elif _is_view(leaf.value):
            checkpoint.tensors[name] = place(leaf.value)
        else:
            checkpoint.values[name] = leaf.value


def _is_view(value: Any) -> bool:
    return isinstance(value, torch_zip.View)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch_zip.View, TensorEntry))


def entry_of(starts: dict[str, int], key: str, view: torch_zip.View) -> TensorEntry:
    """The tensor that a view in the object `key` is; `starts` are the starts of its storages."""
    base, item = starts[view.storage.key], view.dtype.itemsize
    shard = TensorShard(
        (0,) * len(view.shape), view.shape, key, base + view.offset * item, view.num_spanned * item, view.strides
    )
    storage = (key, base, view.storage.num_elements * view.storage.dtype.itemsize)
    return TensorEntry(view.dtype, view.shape, (shard,), storage)
