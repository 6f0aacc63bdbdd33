"""Which tensors go into which file, and which rank writes it; decided by the coordinator from the plans of all ranks.

    A part of the state (what is under one key of it) has files of its own, with its own names. A tensor that one rank
    has whole goes into a file of that rank. The others go, the largest first, to the rank that writes least so far: if
    several ranks have the tensor whole, to one of these; the chunks of a sharded tensor are sent to that rank.

A part of the state (what stands under one key of it) has files of its own, with its own names. A tensor that one rank has whole
goes into a file of that rank; others, the largest first, where the least is written: one that several ranks have whole is then
that rank's own, and the chunks of a sharded one are brought there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from loaderkit.checkpoint.discovery.kinds import INDEX
from loaderkit.checkpoint.formats.blockwise import ABSMAX, num_blocks
from loaderkit.checkpoint.formats.safetensors import DTYPES
from loaderkit.checkpoint.save.safetensors.export import ExportRule, absmax_key, check_rule
from loaderkit.errors import CheckpointError, ConfigError
from loaderkit.ranks.pieces import Address

MAX_FILE_BYTES = 5 * 10**9
"""Bytes of tensors in one file, as Hugging Face's writers limit them; a single tensor may have more."""
MIN_FILE_BYTES = 64 * 2**20
"""Bytes a rank: a part of the state with less for each rank has fewer files than there are ranks."""
_BALANCE = 1.1  # most bytes of a file over their mean, for the sake of tensors that need not be sent
_MAX_STEM = 80
Shape = tuple[int, ...]


class GivenBox(NamedTuple):
    """A box of a tensor: the chunk with number `number` among the chunks that `rank` has to give."""

    offsets: Shape
    sizes: Shape
    rank: int
    number: int


class LaidTensor(NamedTuple):
    """A tensor: its name in the state and in the file, where its elements are, and the ranks that have all of them.
    `made_of`: the dtype and shape of these elements, if what is stored is made of them."""

    name: str
    key: str
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[GivenBox, ...]
    holders: frozenset[int] = frozenset()
    made_of: tuple[torch.dtype, Shape] | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class LaidFile(NamedTuple):
    """A file that rank `writer` writes: its tensors in order, and the names (in the file) of tensors that are the same
    as one of them."""

    name: str
    writer: int
    prefix: str
    index_name: str
    tensors: tuple[LaidTensor, ...]
    aliases: Mapping[str, str]


class Offer(NamedTuple):
    """What a rank adds to its plan: the address where others get its chunks, if there are others; and for each of its
    tensors a number, which is the same for tensors whose elements are the same memory."""

    address: Address | None
    memory: Mapping[str, int]


class Layout(NamedTuple):
    """All files. `given` are, for each rank, the chunks that it gives, (name, offsets), in the order of their numbers."""

    files: tuple[LaidFile, ...]
    given: tuple[tuple[tuple[str, Shape], ...], ...]
    paths: Mapping[str, tuple[Any, ...]]

    def sources_of(self, writer: int) -> set[int]:
        """The other ranks that have chunks of what a rank writes."""
        mine = (tensor for file in self.files if file.writer == writer for tensor in file.tensors)
        return {chunk.rank for tensor in mine for chunk in tensor.chunks} - {writer}


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ConfigError for a type that safetensors has not."""
    if dtype not in DTYPES.values():
        raise ConfigError(
            f"state: {name!r} is of {dtype}, which safetensors has not: convert it (complex numbers by torch.view_as_real), "
            "or use format dcp"
        )


def lay_out(
    plans: Sequence[SavePlan], offers: Sequence[Offer], generation: int, rule: ExportRule | None = None
) -> Layout:
    """The layout of what the ranks have planned, with nothing in it twice, or of what `rule` makes of it. `generation`
    is part of the files' names, so that they differ from older files beside them.

    Raises ConfigError for a type or name that safetensors has not, CheckpointError for a tensor of which a part is missing.
    """
    paths: dict[str, tuple[Any, ...]] = {}
    for plan in reversed(plans):
        paths.update(plan.planner_data or {})
    tensors, given = _tensors(plans, offers, rule)
    same = _same(tensors, offers)
    parts: dict[str, list[LaidTensor]] = {}
    top: list[LaidTensor] = []
    for name, tensor in tensors.items():
        path = paths.get(name, (name,))
        (parts.setdefault(str(path[0]), []) if len(path) > 1 else top).append(tensor)
    if top:
        own = "model"
        while own in parts or (parts and own == "model"):
            own = "tensors" if own == "model" else f"{own}_"
        parts[own] = top
    found: dict[str, list[LaidFile]] = {}
    loads = [0] * len(plans)
    # The largest part last: it evens out the parts that have fewer files than there are ranks.
    for part, listed in sorted(parts.items(), key=lambda item: sum(tensor.num_bytes for tensor in item[1])):
        prefix = "" if listed is top else f"{part}."
        made = _files_of(part, prefix, listed, same, loads=loads, generation=generation, rule=rule)
        found[part] = [_given_by_holders(file, given) for file in made]
    files = [file for part in parts for file in found[part]]
    if len({file.name for file in files}) < len(files):
        raise ConfigError(f"state: two of its parts would have files of the same name ({', '.join(parts)}): rename one")
    return Layout(tuple(files), tuple(tuple(chunks) for chunks in given), paths)


def _tensors(
    plans: Sequence[SavePlan], offers: Sequence[Offer], rule: ExportRule | None
) -> tuple[dict[str, LaidTensor], list[list[tuple[str, Shape]]]]:
    """The tensors by name, in the order of the plans, and the chunks that each rank gives."""
    tensors: dict[str, LaidTensor] = {}
    given: list[list[tuple[str, Shape]]] = [[] for _ in plans]
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or (rule is not None and not rule.has(item.index.fqn)):
                continue
            assert item.tensor_data is not None
            name, data = item.index.fqn, item.tensor_data
            check_dtype(name, data.properties.dtype)
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            known = tensors.setdefault(name, LaidTensor(name, name, data.properties.dtype, tuple(data.size), ()))
            if prod(sizes):
                chunk = GivenBox(offsets, sizes, rank, len(given[rank]))
                given[rank].append((name, offsets))
                tensors[name] = known._replace(chunks=(*known.chunks, chunk))
    if rule is not None:
        check_rule(rule, [*tensors], [item.index.fqn for plan in plans for item in plan.items if item.tensor_data])
    for name, tensor in tensors.items():
        if len(tensor.chunks) == 1:
            holders = {rank for rank, offer in enumerate(offers) if name in offer.memory}
            tensors[name] = tensor._replace(holders=frozenset({tensor.chunks[0].rank} | holders))
        covered = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        if covered != prod(tensor.shape):
            raise CheckpointError(
                f"{tensor.name!r} is not planned whole: its chunks have {covered} elements, and its shape is {tensor.shape}"
            )
    return tensors, given


def _same(tensors: Mapping[str, LaidTensor], offers: Sequence[Offer]) -> dict[str, tuple[Any, ...]]:
    """Name -> a key that is equal for tensors that are the same memory on every rank that has elements of them."""
    keys: dict[str, tuple[Any, ...]] = {}
    for name, tensor in tensors.items():
        numbers = [(rank, offer.memory[name]) for rank, offer in enumerate(offers) if name in offer.memory]
        keys[name] = (tensor.dtype, tensor.shape, *numbers) if numbers and tensor.num_bytes else (name,)
    return keys


def _files_of(
    part: str,
    prefix: str,
    listed: Iterable[LaidTensor],
    same: Mapping[str, tuple[Any, ...]],
    *,
    loads: list[int],
    generation: int,
    rule: ExportRule | None,
) -> list[LaidFile]:
    """The files of one part of the state; `loads` are the bytes that each rank writes, which grow."""
    first: dict[tuple[Any, ...], LaidTensor] = {}
    aliases: dict[str, list[str]] = {}
    for tensor in listed:
        key = _key_of(tensor.name, prefix)
        kept = first.setdefault(same[tensor.name], tensor._replace(key=key))
        if kept.name != tensor.name:
            aliases.setdefault(kept.key, []).append(key)
    tensors = [*first.values()]
    if rule is not None:
        tensors = _converted(tensors, rule)
        scales = {tensor.key for tensor in tensors} - {tensor.key for tensor in first.values()}
        aliases |= {
            key + ABSMAX: [alias + ABSMAX for alias in tied] for key, tied in aliases.items() if key + ABSMAX in scales
        }
    bins = _dealt(tensors, loads)
    is_indexed = len(bins) > 1 or generation > 0
    files = []
    for number, (writer, inside) in enumerate(bins, 1):
        inside.sort(
            key=lambda tensor: -tensor.dtype.itemsize
        )  # so that every tensor begins at a multiple of its elements
        files.append(
            LaidFile(
                _file_name(part, number, len(bins), generation, is_indexed=is_indexed),
                writer,
                prefix,
                f"{_stem(part)}.safetensors{INDEX}" if is_indexed else "",
                tuple(inside),
                {alias: tensor.key for tensor in inside for alias in aliases.get(tensor.key, ())},
            )
        )
    return files


def _converted(tensors: Sequence[LaidTensor], rule: ExportRule) -> list[LaidTensor]:
    """What an export stores for these tensors. Raises ConfigError."""
    keys, stored = {tensor.key for tensor in tensors}, []
    for tensor in tensors:
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize <= rule.dtype.itemsize:
            stored.append(tensor)
            continue
        made = tensor._replace(made_of=(tensor.dtype, tensor.shape), dtype=rule.dtype)
        stored.append(made)
        if rule.is_quantized:
            key, blocks = absmax_key(tensor.key, keys), (num_blocks(prod(tensor.shape)),)
            stored.append(made._replace(name=tensor.name + ABSMAX, key=key, dtype=torch.float32, shape=blocks))
    return stored


def _given_by_holders(file: LaidFile, given: list[list[tuple[str, Shape]]]) -> LaidFile:
    """The same file, in which chunks that its writer has itself come from the writer; they are added to the chunks it
    gives."""
    tensors = []
    for tensor in file.tensors:
        if file.writer in tensor.holders and tensor.chunks[0].rank != file.writer:
            (chunk,), own = tensor.chunks, given[file.writer]
            tensor = tensor._replace(chunks=(chunk._replace(rank=file.writer, number=len(own)),))  # noqa: PLW2901
            own.append(given[chunk.rank][chunk.number])
        tensors.append(tensor)
    return file._replace(tensors=tuple(tensors))


def _dealt(tensors: Sequence[LaidTensor], loads: list[int]) -> list[tuple[int, list[LaidTensor]]]:
    """(the rank that writes it, its tensors) for each file, the tensors in their order; `loads` grow by what each writes."""
    total, num_ranks = sum(tensor.num_bytes for tensor in tensors), len(loads)
    num_files = max(1, ceil(total / MAX_FILE_BYTES), min(num_ranks, total // MIN_FILE_BYTES))
    order = sorted(range(num_ranks), key=lambda rank: loads[rank])
    writers = [order[number % num_ranks] for number in range(num_files)]
    sizes, most = [0] * num_files, _BALANCE * total / num_files
    chosen: dict[str, int] = {}
    for tensor in sorted(tensors, key=lambda tensor: -tensor.num_bytes):
        near = [n for n in range(num_files) if tensor.holders == {writers[n]} and sizes[n] + tensor.num_bytes <= most]
        best = min(near or range(num_files), key=lambda n: (loads[writers[n]], sizes[n]))
        sizes[best] += tensor.num_bytes
        loads[writers[best]] += tensor.num_bytes
        chosen[tensor.name] = best
    bins: list[tuple[int, list[LaidTensor]]] = [(writer, []) for writer in writers]
    for tensor in tensors:
        bins[chosen[tensor.name]][1].append(tensor)
    return [item for item in bins if item[1]]


def _key_of(name: str, prefix: str) -> str:
    """A tensor's name in its file. Raises ConfigError."""
    key = name.removeprefix(prefix)
    if key == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ConfigError(f"state: safetensors has no tensors named {name!r}: rename it, or use format dcp")
    return key


def _stem(part: str) -> str:
    """What begins the names of a part's files: the part's name, with letters that all stores take."""
    stem = quote(part, safe="").replace(".", "%2E") or "%"
    return stem if len(stem) <= _MAX_STEM else f"{stem[:60]}%{hashlib.sha256(part.encode()).hexdigest()[:16]}"


def _file_name(part: str, number: int, count: int, generation: int, *, is_indexed: bool) -> str:
    numbered = f"-{number:05d}-of-{count:05d}" if is_indexed else ""
    return f"{_stem(part)}{numbered}{f'.{generation}' if generation else ''}.safetensors"
