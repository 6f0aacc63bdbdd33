"""The place of a rank in a mesh: which dimensions share out the samples, and which ranks get the same."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from mesh_programs import as_rank
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ConfigError
from loaderkit.ranks.place import Place, place_in_mesh

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("pp", "dp_replicate", "dp_shard", "tp")
SHAPE = (2, 3, 2, 2)


def numbers(num_samples: int = 240) -> Pipeline:
    return Pipeline.dataset(list(range(num_samples))).read().batch(2).shuffle("global", seed=1)


@pytest.mark.parametrize("data_dims", [(), ("dp_shard",), ("dp_replicate", "dp_shard"), ("tp", "pp"), NAMES])
def test_ranks_and_those_that_get_the_same(data_dims: tuple[str, ...]) -> None:
    """Against a count of all ranks by their coordinates."""
    grid = np.arange(24).reshape(SHAPE)
    order = [name for name in NAMES if name in data_dims]
    shares = [*itertools.product(*(range(SHAPE[NAMES.index(name)]) for name in order))]
    for rank in (0, 7, 23):
        own = dict(zip(NAMES, (int(place[0]) for place in np.nonzero(grid == rank)), strict=True))
        same = [
            int(other)
            for other in grid.flatten()
            if all(np.nonzero(grid == other)[NAMES.index(name)][0] == own[name] for name in order)
        ]
        with as_rank(rank, 24):
            place = place_in_mesh(init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES), data_dims)
        assert place == Place(
            shares.index(tuple(own[name] for name in order)), len(shares), tuple(same), same.index(rank)
        )


def test_a_loader_of_a_mesh_has_the_batches_of_its_data_rank() -> None:
    with loaderkit.build(numbers(), rank=1, world_size=2) as loader:
        wanted = [batch["0"].tolist() for batch in loader]
    for rank, name in ((1, "dp"), (3, "dp"), (2, ("dp",))):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
            with loaderkit.build(numbers(), mesh=mesh, data_dims=name) as loader:
                seen = [batch["0"].tolist() for batch in loader]
                assert "of 2" in repr(loader)
        assert (seen == wanted) is (rank != 2)


def test_a_part_of_a_mesh_is_a_mesh() -> None:
    with as_rank(5, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert place_in_mesh(mesh["dp"], "dp") == Place(0, 2, (5,), 0)
        assert place_in_mesh(mesh["dp", "tp"], ("dp",)) == Place(0, 2, (4, 5), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"names 'dp_replicate', and the mesh has dp, tp; .*in data_dims=\('dp',\)"),
        ({"data_dims": ("dpp",)}, "names 'dpp', and the mesh has dp, tp; did you mean 'dp'"),
        ({"data_dims": ("dp", "dp")}, "names 'dp' twice"),
        ({"data_dims": "dp", "rank": 0, "world_size": 2}, "either mesh, or rank and world_size"),
        ({"data_dims": "dp", "mesh": None}, "name dimensions of a mesh, and there is none"),
        ({"data_dims": "dp", "mesh": 4}, "mesh is a torch.distributed DeviceMesh"),
    ],
)
def test_what_is_no_place_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ConfigError, match=message):
            loaderkit.build(numbers(), **{"mesh": mesh, **arguments})


def test_a_mesh_without_names_and_a_rank_outside() -> None:
    with as_rank(3, 4):
        with pytest.raises(ConfigError, match="the mesh has no names"):
            loaderkit.build(numbers(), mesh=init_device_mesh("cpu", (2, 2)), data_dims="dp")
        part = DeviceMesh("cpu", [0, 2], mesh_dim_names=("dp",))
        with pytest.raises(ConfigError, match="rank 3 is not in the mesh, whose ranks are 0, 2"):
            loaderkit.build(numbers(), mesh=part, data_dims="dp")
