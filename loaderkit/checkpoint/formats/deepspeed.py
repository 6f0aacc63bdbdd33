"""Merges what DeepSpeed saves of a ZeRO run: whole weights and the whole state of the optimizer, from any number of ranks.

    *zero_pp_rank_R_mp_rank_00_optim_states.pt    rank R's part of flat vectors: fp32 weights, and each state of the optimizer
    mp_rank_00_model_states.pt                    names and shapes of the parameters in their order in those, and the rest

ZeRO 1 and 2 lay all parameters of a group end to end and cut that line into equal parts, one a rank. ZeRO 3 cuts each parameter
into equal parts, and lays a rank's parts end to end. A parameter is then boxes in several ranks' files; nothing is copied.
The layout is that which DeepSpeed's `zero_to_fp32.py` (0.19) reads.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from loaderkit.checkpoint.contents import TensorEntry, TensorShard, strides_of
from loaderkit.checkpoint.formats.plain_values import FrozenTable
from loaderkit.checkpoint.formats.restricted_pickle import shown
from loaderkit.checkpoint.formats.torch_zip import View
from loaderkit.checkpoint.tensor_boxes import boxes_in
from loaderkit.errors import FormatError

OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
"""The name of a rank's part of the optimizer: (rank among those that share the data, rank among those that share the model)."""
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
"""The name of a file with the rest; in a run of ZeRO 3 each rank has one."""
_EXPERTS = re.compile(r"(?:expp_rank_|expert_|layer_\d+_expert_).*\.pt")
_HANDLED = ("module", "optimizer", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes",
            "frozen_param_fragments", "universal_checkpoint_info")  # fmt: skip
_MAX_KINDS = 64
_MAX_COMPARED = 4  # tables in tables: deeper than any option of an optimizer
Shape = tuple[int, ...]


class RankFile(NamedTuple):
    """The value in a file, and what gives the place of a tensor in it."""

    value: Any
    place: Callable[[View], TensorEntry]


def check_names(names: Iterable[str]) -> list[str]:
    """The names of the parts of the optimizer among all files of a folder, by rank; none without ZeRO.

    Raises FormatError where parallelism of another kind has cut the model, or a rank's file is missing.
    """
    names = [*names]
    parts = sorted((int(match[1]), match[0]) for match in map(OPTIMIZER_FILE.fullmatch, names) if match)
    if not parts:
        return []
    if cut := [match[0] for match in map(MODEL_FILE.fullmatch, names) if match and int(match[2])]:
        raise FormatError(
            f"tensor parallelism has cut its model ({cut[0]!r}), and how is not in the files: merge it by DeepSpeed's "
            "ds_to_universal.py, or name one file to restore what is in that"
        )
    if experts := [name for name in names if _EXPERTS.fullmatch(name)]:
        raise FormatError(f"it has experts of their own ({experts[0]!r}), which lie on some ranks only: name one file")
    missing = next((rank for rank, (found, _) in enumerate(parts) if rank != found), None)
    if missing is not None:
        raise FormatError(f"the part of rank {missing} of the optimizer's is missing, or there are two of a rank")
    return [name for _, name in parts]


def merge(models: Sequence[RankFile], parts: Sequence[RankFile]) -> dict[str, Any]:
    """The nested state of a run: "module" and "optimizer" as `torch.distributed.checkpoint.state_dict` names them, and the rest
    of the first file. Tensors are `TensorEntry`; in the rest they are still a `View` of that file.

    `models`: the files with the rest, by rank (of the ranks after the first only frozen parts are used); `parts`: the
    files of the optimizer. Weights are fp32, as the optimizer has them. Raises FormatError.
    """
    try:
        run = _ZeroRun(models, parts)
        rest = {key: value for key, value in run.model.items() if key not in _HANDLED}
        return {"module": run.module(), "optimizer": run.optimizer(), **rest}
    except FormatError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise FormatError(f"its files do not describe a run of ZeRO: {error!r:.200}") from None


def with_frozen(model: RankFile, names: Sequence[str], num_ranks: int) -> list[str]:
    """Which of `names`, the files with the rest by rank, are needed besides `model`, which is the first: those of all
    ranks if ZeRO 3 has cut parameters that are not trained. Raises FormatError if one of these is missing."""
    ranks = [match[1] for match in map(MODEL_FILE.fullmatch, names) if match]
    if not isinstance(model.value, Mapping) or not model.value.get("frozen_param_fragments") or ranks[0] is None:
        return []
    missing = next((rank for rank in range(num_ranks) if f"{rank}" not in ranks), None)
    if missing is not None:
        raise FormatError(
            f"zero_pp_rank_{missing}_mp_rank_00_model_states.pt is missing, which has a part of each parameter that is not "
            "trained"
        )
    return [*names[1:num_ranks]]


def lacks_parts(name: str, value: Any) -> bool:
    """True for a file of ZeRO with weights of 16 bits, beside which there should be the parts of the optimizer."""
    return MODEL_FILE.fullmatch(name) is not None and isinstance(value, Mapping) and bool(value.get("param_shapes"))


class _Piece(NamedTuple):
    """`size` elements from `byte` on of the object `key`."""

    key: str
    byte: int
    size: int


class _Line:
    """Flat tensors of one type laid end to end."""

    def __init__(self, tensors: Iterable[TensorEntry]) -> None:
        entries = [*tensors]
        self.dtype = entries[0].dtype
        for entry in entries:
            if len(entry.shape) != 1 or entry.dtype != self.dtype or entry.shards[0].strides != (1,):
                raise FormatError(f"a part of a flat vector has the shape {list(entry.shape)} and is {entry.dtype}")
        self._pieces = [_Piece(e.shards[0].key, e.shards[0].start, e.shape[0]) for e in entries]
        self._ends = [*accumulate(piece.size for piece in self._pieces)]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._ends[-1]

    def cut(self, first: int, end: int) -> Iterator[_Piece]:
        """The elements [first, end)."""
        if end > self.size:
            raise FormatError(f"a parameter ends at element {end} of a flat vector of {self.size}")
        number = bisect_right(self._ends, first)
        while first < end:
            key, byte, size = self._pieces[number]
            begin = self._ends[number] - size
            taken = min(end, self._ends[number]) - first
            if taken:
                yield _Piece(key, byte + (first - begin) * self.dtype.itemsize, taken)
            first, number = first + taken, number + 1


class _Parameter(NamedTuple):
    """A parameter: the number of its flat vector, and where it begins there. With ZeRO 3 it begins there in each rank's
    part."""

    group: int
    first: int
    shape: Shape


class _ZeroRun:
    """One run's files."""

    def __init__(self, models: Sequence[RankFile], parts: Sequence[RankFile]) -> None:
        self.model = _table(models[0].value, "it is no table, but {}")
        self._models, self._places = models, [part.place for part in parts]
        self._optimizers = [
            _table(
                _table(part.value, "a part of the optimizer is {}").get("optimizer_state_dict"), "its optimizer is {}"
            )
            for part in parts
        ]
        head = self._optimizers[0]
        self.is_sharded = "fp32_flat_groups" in head  # ZeRO 3
        counts = head.get("partition_count")
        counted = [*counts] if isinstance(counts, (list, tuple)) and counts else [counts]
        if "ds_zero_partition_groups" in head or any(count != counted[0] for count in counted):
            raise FormatError(
                "its experts are divided among other ranks than the rest: convert it by ds_to_universal.py"
            )
        if counted[0] != len(parts):
            raise FormatError(
                f"it was saved by {shown(counted[0])} ranks, and there are the files of {len(parts)}: a file is missing, or "
                "those of an older save of more ranks are left"
            )
        self._shapes = [
            {name: _shape(shape) for name, shape in _table(group, "its shapes are {}").items()}
            for group in _list(self.model.get("param_shapes"), "its param_shapes are {}")
        ]
        key = "fp32_flat_groups" if self.is_sharded else "single_partition_of_fp32_groups"
        groups = [_list(optimizer.get(key), f"its {key} are {{}}") for optimizer in self._optimizers]
        if any(len(mine) != len(self._shapes) for mine in groups):
            raise FormatError(f"it has {len(self._shapes)} groups of parameters, and {len(groups[0])} flat vectors")
        self._weights = [[self._flat(rank, mine[g]) for rank, mine in enumerate(groups)] for g in range(len(groups[0]))]
        self._parameters = self._laid()

    def _flat(self, rank: int, view: Any) -> TensorEntry:
        if not isinstance(view, View):
            raise FormatError(f"a flat vector of rank {rank} is {shown(view)}")
        return self._places[rank](view)

    def _laid(self) -> dict[str, _Parameter]:
        """Where each parameter lies in the flat vectors."""
        num_ranks = len(self._optimizers)
        parameters: dict[str, _Parameter] = {}
        paddings = self._optimizers[0].get("param_alignment_paddings")
        at = 0
        for number, shapes in enumerate(self._shapes):
            gaps = (
                paddings[number] if isinstance(paddings, (list, tuple)) and not self.is_sharded else [0] * len(shapes)
            )
            at = at if self.is_sharded else 0
            for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
                if type(gap) is not int or gap < 0 or name in parameters:
                    raise FormatError(
                        f"the parameter {shown(name)} is there twice, or has {shown(gap)} elements behind it"
                    )
                parameters[name] = _Parameter(number, at, shape)
                at += -(-prod(shape) // num_ranks) if self.is_sharded else prod(shape) + gap
            if not self.is_sharded:
                size = sum(entry.shape[0] for entry in self._weights[number])
                # Each part is a multiple of two elements; the last rank's padding may be cut off or not.
                if not at <= size < at + 2 * num_ranks:
                    raise FormatError(f"the parameters of group {number} are {at} elements, and its flat vector {size}")
        if self.is_sharded:
            sizes = {sum(group[rank].shape[0] for group in self._weights) for rank in range(num_ranks)}
            if sizes != {at}:
                raise FormatError(f"the parameters are {at} elements a rank, and the flat vectors {shown(sizes)}")
        return parameters

    def _merged(self, flat: Sequence[Sequence[TensorEntry]], names: Iterable[str]) -> dict[str, TensorEntry]:
        """The parameters of these names in flat vectors, which are by group and rank."""
        names = [*names]
        num_ranks = len(self._optimizers)
        if self.is_sharded:
            lines = [_Line(group[rank] for group in flat) for rank in range(num_ranks)] if flat else []
        else:
            lines = [_Line(group) for group in flat]
        merged = {}
        for name in names:
            group, first, shape = self._parameters[name]
            end = first + prod(shape)
            pieces = _divided(lines, first, end - first) if self.is_sharded else lines[group].cut(first, end)
            merged[name] = _entry(lines[0 if self.is_sharded else group], shape, pieces)
        return merged

    # ------------------------------------------------------------------------------------------------------- the model

    def module(self) -> Any:
        """The state of the model by name."""
        saved, place = (
            _table(self.model.get("module"), "its model is {}: was it cut by a pipeline?"),
            self._models[0].place,
        )
        whole = {**self._frozen(), **self._merged(self._weights, self._parameters)}
        shared = _table(self.model.get("shared_params") or {}, "its shared_params are {}")
        for alias, name in shared.items():
            if name in whole:
                whole[alias] = whole[name]
        buffers = self.model.get("buffer_names") or ()
        table = FrozenTable()
        for name, value in saved.items():
            if name in whole:
                table[name] = whole.pop(name)
            elif not isinstance(value, View):
                table[name] = value
            elif (
                name in buffers or not self.is_sharded
            ):  # else it is an empty tensor in the place of one that was left out
                table[name] = place(value)
        table.update(whole)
        if hasattr(saved, "_metadata"):
            table._metadata = saved._metadata
        return table

    def _frozen(self) -> dict[str, TensorEntry]:
        """Parameters that are not trained, which the optimizer does not have."""
        shapes = _table(self.model.get("frozen_param_shapes") or {}, "its frozen_param_shapes are {}")
        frozen = {}
        for name, shape in shapes.items():
            parts = []
            for model in self._models if self.is_sharded else self._models[:1]:
                fragments = _table(model.value, "it is {}").get("frozen_param_fragments") or {}
                if isinstance(fragments.get(name), View):
                    parts.append(model.place(fragments[name]))
            if len(parts) != (len(self._optimizers) if self.is_sharded else 1):
                continue  # it was saved without them
            whole = _shape(shape)
            if self.is_sharded:
                frozen[name] = _entry(_Line(parts[:1]), whole, _divided([_Line([p]) for p in parts], 0, prod(whole)))
            else:
                frozen[name] = parts[0]
        return frozen

    # --------------------------------------------------------------------------------------------------- the optimizer

    def optimizer(self) -> dict[str, Any]:
        """The state of the optimizer by names of parameters."""
        key = "optimizer_state_dict" if self.is_sharded else "base_optimizer_state"
        bases = [optimizer.get(key) for optimizer in self._optimizers]
        if isinstance(bases[0], list):
            raise FormatError("it was saved with elastic_checkpoint, whose parts DeepSpeed alone can merge")
        states = [_table(_table(base, "its optimizer is {}").get("state"), "its state is {}") for base in bases]
        for rank, base in enumerate(bases):
            if where := _difference(bases[0], base):
                raise FormatError(
                    f"the optimizer of rank {rank} has another {where} than that of rank 0: their files are of different "
                    "saves"
                )
        state: dict[str, dict[str, Any]] = {}
        kinds = dict.fromkeys(kind for one in states[0].values() for kind in one)
        if len(kinds) > _MAX_KINDS:
            raise FormatError(f"its optimizer has {len(kinds)} states a parameter, more than any has")
        for kind in kinds:
            found = [
                [states[rank].get(g, {}).get(kind) for rank in range(len(states))] for g in range(len(self._shapes))
            ]
            flat = [g for g in range(len(found)) if self._is_flat(g, found[g])]
            if self.is_sharded and 0 < len(flat) < len(found):
                raise FormatError(f"only some flat vectors have the state {kind!r}")
            vectors = [
                [self._flat(rank, view) for rank, view in enumerate(found[g])] if g in flat else self._weights[g]
                for g in range(len(found))
            ]
            names = [name for g in flat for name in self._shapes[g]]
            merged = self._merged(vectors, names) if names else {}
            for g, shapes in enumerate(self._shapes):
                if g not in states[0] or kind not in states[0][g]:
                    continue
                if g not in flat and isinstance(found[g][0], View) and prod(found[g][0].shape) > 1:
                    continue  # it is of the flat vector as a whole, and of no parameter
                plain = None if g in flat else _placed(found[g][0], self._places[0])
                if isinstance(plain, TensorEntry):  # such as a step, which each parameter counts in memory of its own
                    plain = replace(plain, storage=None)
                for name in shapes:
                    state.setdefault(name, {})[kind] = merged.get(name, plain)
        return {"state": state, "param_groups": self._groups(bases[0])}

    def _is_flat(self, group: int, found: Sequence[Any]) -> bool:
        """True if a state has as many elements as the weights, apart from the padding of the last rank's part. Raises
        FormatError if that is so on some ranks only."""
        are_flat = {
            isinstance(view, View) and len(view.shape) == 1 and view.shape[0] >= weights.shape[0]
            for view, weights in zip(found, self._weights[group], strict=True)
            if weights.shape[0]
        }
        if len(are_flat) > 1:
            raise FormatError(f"a state of group {group} of the optimizer is as long as the weights on some ranks only")
        return True in are_flat

    def _groups(self, base: Mapping[Any, Any]) -> list[dict[Any, Any]]:
        groups = []
        for group in _list(base.get("param_groups"), "its param_groups are {}"):
            options = _placed(_table(group, "a group is {}"), self._places[0])
            numbers = [n for n in options.get("params") or () if type(n) is int and 0 <= n < len(self._shapes)]
            groups.append({**options, "params": [name for number in numbers for name in self._shapes[number]]})
        return groups


def _divided(lines: Sequence[_Line], first: int, size: int) -> Iterator[_Piece]:
    """A tensor of `size` elements, of which each line has an equal part from `first` on; the last are filled up."""
    each = -(-size // len(lines))
    for rank, line in enumerate(lines):
        yield from line.cut(first, first + max(0, min(each, size - rank * each)))


def _entry(line: _Line, shape: Shape, pieces: Iterable[_Piece]) -> TensorEntry:
    """The tensor that pieces make, one after the other."""
    shards, at = [], 0
    for key, byte, size in pieces:
        start = byte
        for box in boxes_in(shape, at, at + size):
            num_bytes = prod(box.sizes) * line.dtype.itemsize
            shards.append(TensorShard(box.offsets, box.sizes, key, start, num_bytes, strides_of(box.sizes)))
            start += num_bytes
        at += size
    return TensorEntry(line.dtype, shape, tuple(shards))


def _difference(one: Any, other: Any, depth: int = 0) -> str | None:
    """Where two states have different numbers or texts, such as the step; None if they are the same. Tensors, and
    entries that only one state has, do not count."""
    if depth > _MAX_COMPARED:
        return None
    inside: Iterable[tuple[str, Any, Any]]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        inside = ((str(key), one[key], other[key]) for key in one if key in other)
    elif type(one) in (list, tuple) and type(one) is type(other):
        inside = ((str(number), *pair) for number, pair in enumerate(zip(one, other, strict=False)))
    else:
        is_plain = type(one) in (int, float, bool, str) and type(one) is type(other)
        return "value" if is_plain and repr(one) != repr(other) else None
    for key, mine, its in inside:
        if where := _difference(mine, its, depth + 1):
            return key if where == "value" else f"{key}.{where}"
    return None


def _placed(value: Any, place: Callable[[View], TensorEntry], depth: int = 0) -> Any:
    """A plain value with its tensors placed."""
    if isinstance(value, View):
        return place(value)
    if depth > 100:
        raise FormatError("it is nested too deeply to be a checkpoint")
    if isinstance(value, Mapping):
        inside = {key: _placed(item, place, depth + 1) for key, item in value.items()}
        return inside if any(inside[key] is not value[key] for key in inside) else value
    if type(value) in (list, tuple):
        items = type(value)(_placed(item, place, depth + 1) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


def _table(value: Any, said: str) -> Any:
    if not isinstance(value, Mapping):
        raise FormatError(said.format(shown(value)))
    return value


def _list(value: Any, said: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise FormatError(said.format(shown(value)))
    return value


def _shape(value: Any) -> Shape:
    if not isinstance(value, (list, tuple)) or not all(type(n) is int and 0 <= n <= 2**40 for n in value):
        raise FormatError(f"a parameter has the shape {shown(value)}")
    if len(value) > 64 or prod(max(n, 1) for n in value) > 2**62:
        raise FormatError(f"a parameter has the shape {shown(value)}, which is larger than anything")
    return tuple(value)
