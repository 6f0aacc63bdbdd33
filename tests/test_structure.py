"""What holds of the tree as a whole: no circle of imports, deferred and typing ones included; rooms of at most 14 modules; one
class to a name."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from import_graph import circle, import_graph

import loaderkit
from loaderkit.pipeline.config.registry import SOURCES

_FORMS = (
    "import {module}",
    "from {package} import {last}",
    "from {module} import name",
    "from {module} import (\n    other,\n    name as mine,\n)",
    "from ..{last_package} import {last}",
    "from ..{last_package}.{last} import name",
    "def function():\n    import {module}",
    "class Class:\n    def method(self):\n        from {module} import name",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {module} import name",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {package} import {last}",
    "import importlib\nmodule = importlib.import_module('{module}')",
    "name = imported('{module}:name')",
)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph(Path(loaderkit.__file__).parent)


def test_no_circle_among_imports(graph: dict[str, set[str]]) -> None:
    assert len(graph) > 100
    found = circle(graph)
    assert not found, f"a circle of imports: {' -> '.join([*found, found[0]])}"


def test_rooms_are_small() -> None:
    modules = (path for path in Path(loaderkit.__file__).parent.rglob("*.py") if path.name != "__init__.py")
    crowded = {str(room): num for room, num in Counter(path.parent for path in modules).items() if num > 14}
    assert not crowded


def test_a_class_has_a_name_of_its_own() -> None:
    paths = Path(loaderkit.__file__).parent.rglob("*.py")
    names = Counter(name for path in paths for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE))
    assert len(names) > 500
    assert not {name for name, num in names.items() if num > 1}


def test_kinds_of_sources_do_not_import_one_another(graph: dict[str, set[str]]) -> None:
    homes = [kind.args.__module__.split(".")[:3] for kind in SOURCES.values()]
    rooms = {".".join(home) for home in homes if home[1] == "sources"}
    assert len(rooms) > 5

    def room_of(module: str) -> str | None:
        return next((room for room in rooms if f"{module}.".startswith(f"{room}.")), None)

    crossing = {
        (module, other)
        for module, imported in graph.items()
        for other in imported
        if room_of(module) is not None and room_of(other) not in (None, room_of(module))
    }
    assert not crossing


def test_the_graph_has_all_forms_of_imports(tmp_path: Path, rng: random.Random) -> None:
    names = [f"made.{room}.{module}" for room in ("low", "high") for module in ("a", "b", "c", "d")]
    for room in ("", "low", "high"):
        (tmp_path / "made" / room).mkdir()
        (tmp_path / "made" / room / "__init__.py").touch()
    drawn: dict[str, set[str]] = {"made": set(), "made.low": set(), "made.high": set()}
    for name in names:
        drawn[name] = {other for other in names if other != name and rng.random() < 0.4}
        lines = ['"""Of made."""', "import os", "from numpy import random"]
        for other in drawn[name]:
            package, _, last = other.rpartition(".")
            form = rng.choice(_FORMS)
            lines.append(form.format(module=other, package=package, last=last, last_package=package.split(".")[1]))
        (tmp_path / Path(*name.split("."))).with_suffix(".py").write_text("\n".join(lines))

    assert import_graph(tmp_path / "made") == drawn


def test_a_circle_is_given_as_the_way_around_it(rng: random.Random) -> None:
    for _ in range(100):
        order = [f"m{number}" for number in rng.sample(range(8), 8)]
        graph = {name: {lower for lower in order[:place] if rng.random() < 0.4} for place, name in enumerate(order)}
        assert circle(graph) == []

        low, high = sorted(rng.sample(range(8), 2))
        graph[order[high]].add(order[low])
        graph[order[low]].add(order[high])
        found = circle(graph)
        assert len({*found}) == len(found) > 1
        assert all(following in graph[name] for name, following in zip(found, [*found[1:], found[0]], strict=True))


def test_no_file_of_tests_is_long() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in Path(__file__).parent.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 500} == {}
