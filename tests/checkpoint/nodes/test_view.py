"""What nodes hold together: for any files on any nodes, a step is whole exactly if its files are all there."""

from __future__ import annotations

import random

import pytest

from loaderkit.checkpoint.discovery.manifest import NAME
from loaderkit.checkpoint.nodes.folder import AREAS, OWN, REPLICAS, FolderListing
from loaderkit.checkpoint.nodes.view import merged
from loaderkit.connectors.base import ObjectInfo

STEP = "step-0000000007"


def save(num_nodes: int, generation: int) -> dict[int, dict[str, dict[str, int]]]:
    """The files and sizes of a save by node and area: each node's own, and those of the node before it."""
    data = {node: {f"__{node}_{generation}.distcp": 100 + node} for node in range(num_nodes)}
    small = {".metadata": generation, NAME: 10 * generation}
    return {
        node: {OWN: data[node] | small, REPLICAS: data[(node - 1) % num_nodes] | small if num_nodes > 1 else {}}
        for node in range(num_nodes)
    }


def table_of(num_nodes: int, generation: int) -> dict[str, int]:
    return {f"__{node}_{generation}.distcp": 100 + node for node in range(num_nodes)} | {".metadata": generation}


def listing(files: dict[str, dict[str, int]], tables: dict[str, list[dict[str, int]]]) -> FolderListing:
    infos = {
        area: [ObjectInfo(f"{STEP}/{name}", size, f"{size}") for name, size in files.get(area, {}).items()]
        for area in AREAS
    }
    manifests = {
        area: {f"{STEP}/{NAME}": tables[area]} if NAME in files.get(area, {}) and tables.get(area) else {}
        for area in AREAS
    }
    return FolderListing(infos, manifests)


@pytest.mark.parametrize("num_nodes", [2, 3, 5])
def test_one_node_may_be_lost_and_no_two_neighbours(num_nodes: int) -> None:
    saved = save(num_nodes, 3)
    tables = {area: [table_of(num_nodes, 3)] for area in AREAS}
    for lost in range(2**num_nodes - 1):
        nodes = [node for node in range(num_nodes) if not lost >> node & 1]
        view = merged({node: listing(saved[node], tables) for node in nodes}, nodes[0])
        is_whole = all(node in nodes or (node + 1) % num_nodes in nodes for node in range(num_nodes))
        assert (f"{STEP}/{NAME}" in view.files) == is_whole
        assert (STEP not in view.missing) == is_whole
        gone = {f"__{node}_3.distcp" for node in range(num_nodes)} - {key.split("/")[1] for key in view.files}
        assert set(view.missing.get(STEP, ())) == gone


def test_files_of_any_places_against_a_plain_search(rng: random.Random) -> None:
    """Two saves of one step, of which each file is on any places or none: the newer one that is whole counts, and every file
    is where the view says."""
    num_whole = 0
    for _ in range(400):
        num_nodes = rng.randint(1, 4)
        sizes = {generation: table_of(num_nodes, generation) for generation in (1, 2)}
        listings, held = {}, {}
        for node in range(num_nodes):
            files: dict[str, dict[str, int]] = {}
            tables: dict[str, list[dict[str, int]]] = {}
            for area in AREAS:
                described = rng.choice([0, 1, 2])
                files[area] = {} if not described else {".metadata": described, NAME: 10 * described}
                for generation in (1, 2):
                    for name, size in sizes[generation].items():
                        if name != ".metadata" and rng.random() < 0.35:
                            files[area][name] = size if rng.random() < 0.9 else size - 1
                if described:
                    tables[area] = [sizes[described]]
                for name, size in files[area].items():
                    held[node, area, name] = size
            listings[node] = listing(files, tables)
        here = rng.randrange(num_nodes)
        view = merged(listings, here)
        for key, (info, node, area) in view.files.items():
            assert held[node, area, key.split("/")[1]] == info.size
        there = {(name, size) for (_, _, name), size in held.items()}
        whole = [
            generation
            for generation in (2, 1)
            if any(held.get((node, area, NAME)) == 10 * generation for node in range(num_nodes) for area in AREAS)
            and {*sizes[generation].items()} <= there
        ]
        manifest = view.files.get(f"{STEP}/{NAME}")
        assert (manifest is not None) == bool(whole)
        num_whole += bool(whole)
        if manifest is not None:
            assert manifest.info.size == 10 * whole[0]
            for name, size in sizes[whole[0]].items():
                assert view.files[f"{STEP}/{name}"].info.size == size
            own = [
                name
                for name in sizes[whole[0]]
                if name != ".metadata" and held.get((here, OWN, name)) == sizes[whole[0]][name]
            ]
            assert all(view.files[f"{STEP}/{name}"].node == here for name in own)
    assert 50 < num_whole < 350


def test_while_a_step_is_replaced_one_of_both_tables_fits() -> None:
    """Node 0 has the new description already, node 1 still has the old one; the manifest is of both."""
    old, new = table_of(2, 1), table_of(2, 2)
    both = [old | new | {".metadata": 1}, old | new | {".metadata": 2}]
    data = [{f"__{node}_{generation}.distcp": 100 + node for generation in (1, 2)} for node in range(2)]
    listings = {
        0: listing({OWN: data[0] | {".metadata": 2, NAME: 5}}, {OWN: both}),
        1: listing({OWN: data[1] | {".metadata": 1, NAME: 5}}, {OWN: both}),
    }
    view = merged(listings, 1)
    assert view.missing == {}
    assert (view.files[f"{STEP}/{NAME}"].node, view.files[f"{STEP}/.metadata"].node) == (0, 0)
    assert merged(dict(reversed(listings.items())), 0).files[f"{STEP}/.metadata"].node == 0
