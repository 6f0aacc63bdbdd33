"""What a rank does to save a state as safetensors: it offers, writes its files with the others' chunks, and names all files.

offer ──> coordinator: lay_out ──> work of each rank ──> its files (headers, elements from all ranks) ──> state file
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from loaderkit.checkpoint.formats.blockwise import ABSMAX
from loaderkit.checkpoint.formats.plain_json import encode
from loaderkit.checkpoint.formats.safetensors import DTYPES
from loaderkit.checkpoint.formats.state_file import MODEL_CONFIG, STATE, StateFile, TensorsFile
from loaderkit.checkpoint.planning.held import DescribedPlan
from loaderkit.checkpoint.save.engine import SavedFile
from loaderkit.checkpoint.save.file_plan import BytesItem, ElementsItem, ElementSource, FilePlan
from loaderkit.checkpoint.save.safetensors.assembled import AssembledElements
from loaderkit.checkpoint.save.safetensors.export import (
    AbsmaxElements,
    CastElements,
    ExportRule,
    Loss,
    QuantizedElements,
    config_in,
    report_of,
)
from loaderkit.checkpoint.save.safetensors.layout import (
    LaidFile,
    LaidTensor,
    Layout,
    Offer,
    Shape,
    check_dtype,
    lay_out,
)
from loaderkit.checkpoint.save.tensor_bytes import TensorBytes, plain_tensor
from loaderkit.checkpoint.tensor_boxes import Box
from loaderkit.checkpoint.transfer.stages import wait_for_queued
from loaderkit.errors import CheckpointError, ConfigError
from loaderkit.ranks.pieces import PieceClient, PieceServer, RemoteElements
from loaderkit.ranks.sockets import Address

_ALIGNMENT = 64  # of the first tensor, so that no element lies in two parts of a file
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_LOSSES = "loaderkit:losses/"  # begins the name of a rank's, among its values
_IN_EXPORTS = ("loaderkit.step", MODEL_CONFIG)
PART = "part of a checkpoint, which loaderkit-state.json describes"
"""The value of "loaderkit" in the metadata of a file."""

SaveFiles = Callable[[Sequence[FilePlan]], list[SavedFile]]


class RankWork(NamedTuple):
    """What the coordinator tells a rank: the files it writes, the chunks it gives and to whom, and where the others listen."""

    rank: int
    files: tuple[LaidFile, ...]
    given: tuple[tuple[str, Shape], ...]
    takers: tuple[int, ...]
    addresses: Mapping[int, Address]


def check_plain_values(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first value, by name, that safetensors and JSON cannot hold."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            encode(name, value)
            continue
        local = value.to_local() if hasattr(value, "to_local") else value
        check_dtype(name, local.dtype)
        if plain_tensor(local) is None:
            raise _not_plain(name, local)


def model_config_of(state: Mapping[str, Any]) -> dict[str, str]:
    """What a state has, under the manager's own key, for the config.json beside model.safetensors: the config of a
    model of transformers, or of a model built like one."""
    model = state.get("model")
    config = getattr(getattr(model, "module", model), "config", None)
    as_text = getattr(config, "to_json_string", None)
    key = MODEL_CONFIG.rpartition(".")[2]
    return {key: str(as_text())} if isinstance(model, torch.nn.Module) and callable(as_text) else {}


def _memory_of(plan: SavePlan) -> dict[str, int]:
    """For each tensor with elements here: its name -> a number, equal for tensors whose elements are the same memory.
    Empty unless the plan says what is tied."""
    if not isinstance(plan, DescribedPlan):
        return {}
    pairs = zip(plan.items, plan.tied, strict=True)
    return {item.index.fqn: number for item, number in pairs if item.tensor_data and prod(item.tensor_data.chunk.sizes)}


def kept_plan(url: str) -> ConfigError:
    """The error for a planner that sends an earlier save's plan."""
    return ConfigError(
        f"{url}: the planner keeps plans (enable_plan_caching), and safetensors needs each save's own: leave that out"
    )


class SafetensorsSave:
    """One save, as each rank sees it. Close it."""

    def __init__(self, plan: SavePlan, *, is_alone: bool | None = None, rule: ExportRule | None = None) -> None:
        """`plan` is the local one. Unless it says what is tied, such tensors are written as often as they have names. With
        `rule` it is an export."""
        if is_alone is None:
            is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        self._server = None if is_alone else PieceServer()
        self._client: PieceClient | None = None
        self._layout: Layout | None = None
        self._rule = rule
        self._held = plan.items if isinstance(plan, DescribedPlan) else []
        self.report: dict[str, Any] = {}  # on the coordinator, of an export: its size and error
        self.offer = Offer(None if self._server is None else self._server.address, _memory_of(plan))

    def divide(self, plans: Sequence[SavePlan], offers: Sequence[Offer], generation: int) -> list[RankWork]:
        """On the coordinator: what each rank is to do. Raises ConfigError, CheckpointError."""
        self._layout = layout = lay_out(plans, offers, generation, self._rule)
        sources = [layout.sources_of(rank) for rank in range(len(plans))]
        work = []
        for rank in range(len(plans)):
            addresses = {other: address for other in sources[rank] if (address := offers[other].address) is not None}
            if len(addresses) < len(sources[rank]):
                raise CheckpointError("shards are to be moved between ranks, and not all of them listen")
            takers = tuple(other for other, needed in enumerate(sources) if rank in needed)
            files = tuple(file for file in layout.files if file.writer == rank)
            work.append(RankWork(rank, files, layout.given[rank], takers, addresses))
        return work

    def write(
        self, work: RankWork, plan: SavePlan, planner: SavePlanner, save: SaveFiles
    ) -> tuple[list[SavedFile], dict[str, Any]]:
        """Write this rank's files by `save`; (the files, its plain values by name).

        Raises ConfigError, CheckpointError, ConnectorError, PeerError.
        """
        self._client = client = PieceClient(work.rank, work.addresses)
        try:
            return self._write(work, plan, planner, client, save)
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise

    def _write(
        self, work: RankWork, plan: SavePlan, planner: SavePlanner, client: PieceClient, save: SaveFiles
    ) -> tuple[list[SavedFile], dict[str, Any]]:
        values = _values_of(plan, planner, self._rule)
        # The plan has each tensor on one rank only; what others write of it that have it is among what they hold.
        given = _given([*self._held, *plan.items], work.given, planner)
        wait_for_queued({source.device for source in given})
        if self._server is not None:
            self._server.serve(given)
        client.connect()
        losses: dict[str, Loss] = {}
        about = PART if self._rule is None else f"part of an export in {self._rule.precision}, which {STATE} describes"
        plans = []
        for file in work.files:
            sources = [(tensor.name, _elements(tensor, work.rank, given, client, losses)) for tensor in file.tensors]
            header = BytesItem("header", _header(file, about))
            plans.append(FilePlan(file.name, [header, *(ElementsItem(*source) for source in sources)]))
        files = save(plans)
        if losses:
            values[f"{_LOSSES}{work.rank}"] = {
                name: (loss.of_values, loss.of_differences) for name, loss in losses.items()
            }
        client.finish()
        if self._server is not None:
            self._server.wait(work.takers)
        return files, values

    def describe(self, values: Mapping[str, Any]) -> bytes:
        """On the coordinator: the state file."""
        assert self._layout is not None
        values = dict(values)
        losses: dict[str, tuple[float, float]] = {}
        for name in [name for name in values if name.startswith(_LOSSES)]:
            losses |= values.pop(name)
        files: dict[str, TensorsFile] = {}
        aliases: dict[str, str] = {}
        kept: dict[str, tuple[str, ...]] = {}
        for file in self._layout.files:
            names = [tensor.key for tensor in file.tensors]
            num_bytes = sum(tensor.num_bytes for tensor in file.tensors)
            files[file.name] = TensorsFile(file.prefix, names, num_bytes, file.index_name)
            aliases |= {file.prefix + alias: file.prefix + name for alias, name in file.aliases.items()}
            kept |= {file.prefix + name: (file.prefix[:-1], name) for name in names if file.prefix}
        paths = {
            name: [*path]
            for name, path in self._layout.paths.items()
            if tuple(path) != kept.get(name, (name,)) and all(type(key) in (str, int) for key in path)
        }
        if self._rule is None:
            return StateFile(files, values, aliases, paths).encode()
        stored = [tensor for file in self._layout.files for tensor in file.tensors]
        self.report = report_of(stored, losses)
        if MODEL_CONFIG in values and not self._rule.is_quantized:
            values[MODEL_CONFIG] = config_in(values[MODEL_CONFIG], self._rule.precision)
        return StateFile(files, values, aliases, paths, self._rule.described() | self.report).encode()

    def close(self, reason: str = "") -> None:
        """Close the connections; with a `reason`, ranks that still wait for this one hear it. Idempotent."""
        if self._client is not None:
            self._client.close(reason)
        if self._server is not None:
            self._server.close(reason)


def _values_of(plan: SavePlan, planner: SavePlanner, rule: ExportRule | None) -> dict[str, Any]:
    """The plain values of a plan by name."""
    values: dict[str, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        if item.type != WriteItemType.BYTE_IO or (rule is not None and name not in _IN_EXPORTS):
            continue
        if not isinstance(planner, DefaultSavePlanner):
            raise ConfigError(
                f"the planner {type(planner).__name__} gives plain values as pickles only, and format safetensors has none: "
                "use a DefaultSavePlanner, or format dcp"
            )
        values[name] = encode(name, planner.lookup_object(item.index))
    return values


def _given(items: Iterable[WriteItem], chunks: Iterable[tuple[str, Shape]], planner: SavePlanner) -> list[TensorBytes]:
    """The chunks, (name, offsets), that this rank gives."""
    known = {
        (item.index.fqn, tuple(item.tensor_data.chunk.offsets)): item for item in items if item.tensor_data is not None
    }
    given = []
    for name, offsets in chunks:
        value = planner.resolve_data(known[name, offsets])
        tensor = plain_tensor(value)
        if tensor is None:
            raise _not_plain(name, value)
        given.append(TensorBytes(tensor))
    return given


def _not_plain(name: str, value: Any) -> ConfigError:
    kind = type(value)
    return ConfigError(
        f"state: {name!r} is a {kind.__module__}.{kind.__qualname__}, whose elements are not those of one dense tensor, as "
        "safetensors needs: convert it, or use format dcp"
    )


def _elements(
    tensor: LaidTensor, rank: int, given: Sequence[TensorBytes], client: PieceClient, losses: dict[str, Loss]
) -> ElementSource:
    """The elements that are stored; `losses` collects how much they lose."""
    dtype, shape = tensor.made_of or (tensor.dtype, tensor.shape)
    num_bytes = [prod(chunk.sizes) * dtype.itemsize for chunk in tensor.chunks]
    sources: list[ElementSource] = [
        given[chunk.number] if chunk.rank == rank else RemoteElements(client, chunk.rank, chunk.number, size)
        for chunk, size in zip(tensor.chunks, num_bytes, strict=True)
    ]
    if len(sources) == 1:
        (source,) = sources
    else:
        boxes = [Box(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
        source = AssembledElements(shape, dtype.itemsize, [*zip(boxes, sources, strict=True)])
    if tensor.made_of is None:
        return source
    if tensor.name.endswith(ABSMAX) and tensor.dtype == torch.float32:
        return AbsmaxElements(source, dtype)
    loss = losses[tensor.name] = Loss()
    if tensor.dtype == torch.int8:
        return QuantizedElements(source, dtype, loss)
    return CastElements(source, dtype, tensor.dtype, loss)


def _header(file: LaidFile, about: str) -> bytes:
    """What comes before the tensors: 8 bytes with the length of the JSON after them."""
    fields: dict[str, Any] = {"__metadata__": {**file.aliases, "format": "pt", "loaderkit": about}}
    end = 0
    for tensor in file.tensors:
        start, end = end, end + tensor.num_bytes
        fields[tensor.key] = {"dtype": _NAME_OF[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8
    return length.to_bytes(8, "little") + text.ljust(length)
