"""States made up by hypothesis, saved in every format, and how two of them are compared."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from loaderkit.checkpoint.names import Index
from loaderkit.checkpoint.state import ResolvedState

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
)  # fmt: skip
NAMES = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters=("\0",)) | st.sampled_from("./_0"),
    min_size=1,
    max_size=8,
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


class HoldsTable:
    """An object whose state is any table."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self.table = table

    def state_dict(self) -> dict[Any, Any]:
        return self.table

    def load_state_dict(self, table: dict[Any, Any]) -> None:
        self.table = table


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bytes as a contiguous tensor: every bit pattern, NaNs too (bools are 0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any type and shape, sometimes transposed, sliced or expanded."""
    tensor = random_tensor(draw(st.sampled_from(DTYPES)), draw(SHAPES), draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(("plain", "plain", "transposed", "sliced", "strided")))
    if tensor.dim() and kind == "transposed":
        return tensor.permute(*reversed(range(tensor.dim())))
    if tensor.dim() and kind == "sliced":
        return tensor[min(1, len(tensor)) :]
    if tensor.dim() and kind == "strided":
        return tensor[..., ::2]
    return tensor


def flat_states() -> st.SearchStrategy[dict[str, torch.Tensor]]:
    return st.dictionaries(NAMES, tensors(), max_size=6)


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, types and shapes included."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(type(one) is type(other) and one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bytes_in(one) == bytes_in(other)


def bytes_in(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, in C order."""
    if not tensor.numel():
        return b""
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()


def save_dcp(state: dict[str, Any], path: Path) -> None:
    save(state, checkpoint_id=path, no_dist=True)


def nested_of(resolved: ResolvedState) -> dict[str, Any]:
    """The nested state that a walk has flattened, for torch's own `save`; empty tables, which have no name, are there."""
    values, paths = dict(resolved.flat.values), dict(resolved.flat.paths)
    for path in resolved.containers:
        name = ".".join(map(str, path))
        if not any(other == name or other.startswith(f"{name}.") for other in values):
            values[name], paths[name] = {}, tuple(int(key) if isinstance(key, Index) else str(key) for key in path)
    nested: dict[str, Any] = unflatten_state_dict(values, paths)
    return nested


def pack(paths: list[Path], root: Path, archive: Path) -> None:
    """A tar of some files, named relative to `root`."""
    with tarfile.open(archive, "w") as tar:
        for path in paths:
            tar.add(path, path.relative_to(root).as_posix())


def saved(state: Any) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
