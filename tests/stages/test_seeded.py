"""`call: {seeded: true}`: global generators that depend on the sample alone; and `check`, which names what draws without."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawing import Disturbing, Indices, by_numpy, by_python, by_rng, disturb, erase, fail, mix

import loaderkit
from loaderkit import Pipeline
from loaderkit.cli import main

DRAWING = (
    Pipeline.dataset(Disturbing())
    .shuffle(seed=random.randrange(2**32))
    .epochs(2)
    .read()
    .call(by_python, seeded=True)
    .call(disturb, workers=2)
    .call(by_numpy, seeded=True)
    .call(erase, args={"size": 6}, seeded=True)
    .call(by_rng, seeded=True)
    .batch(4)
    .call(mix, seeded=True)
)
PROCESS = {"prefetch.executor": "process"}
INLINE = {"prefetch.executor": "inline"}


def take(loader: loaderkit.Loader, most: int = 20) -> list[dict[str, list[Any]]]:
    """The values of the next batches, of two epochs at most."""
    batches = (batch for _ in range(2) for batch in loader)
    return [
        {name: torch.as_tensor(value).tolist() for name, value in batch.items() if name != "__key__"}
        for _, batch in zip(range(most), batches, strict=False)
    ]


def states() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))


def test_same_bytes_with_all_workers_and_after_a_resume() -> None:
    with loaderkit.build(DRAWING, overrides=INLINE) as loader:
        expected = take(loader)
    assert len(expected) == 20
    done = random.randrange(1, 19)
    with loaderkit.build(DRAWING, overrides={**PROCESS, "prefetch.concurrency": 1}) as loader:
        assert take(loader, done) == expected[:done]
        state = loader.state_dict()
    with loaderkit.build(DRAWING, overrides={**PROCESS, "prefetch.concurrency": 4}) as loader:
        loader.load_state_dict(state)
        assert take(loader) == expected[done:]
    with loaderkit.build(DRAWING, overrides={**PROCESS, "prefetch.processes": 2}) as loader:
        assert take(loader) == expected


def test_every_sample_epoch_stage_and_generator_has_numbers_of_its_own() -> None:
    pipeline = Pipeline.dataset(Indices()).shuffle(False).epochs(2).read()
    for function in (by_python, by_numpy):
        pipeline = pipeline.call(function, seeded=True)
    with loaderkit.build(pipeline.batch(4), overrides=INLINE) as loader:
        made = take(loader)
    numbers = [number for batch in made for name in ("python", "numpy") for row in batch[name] for number in row]
    assert len(set(numbers)) == len(numbers) == 2 * 2 * 40 * 51


@pytest.mark.parametrize("function", [by_python, by_numpy, erase, by_rng, fail])
def test_the_loops_own_generators_are_left_alone(function: Any) -> None:
    pipeline = Pipeline.dataset(Indices()).epochs(2).read().call(function, seeded=True).batch(4)
    before = states()
    with loaderkit.build(pipeline, overrides={**INLINE, "errors.on_bad_sample": "replace"}) as loader:
        assert len(take(loader)) == 20
    assert states() == before


def check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str, *calls: str, executor: str = "process"
) -> dict[str, list[str]]:
    file = tmp_path / "drawing.yaml"
    stages = ", ".join(["read", *calls, "batch: {size: 4}"])
    file.write_text(
        f"source: {{kind: dataset, object: 'drawing:{data}'}}\nstages: [{stages}]\nprefetch: {{executor: {executor}}}\n"
    )
    assert main(["check", str(file)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  random ")]
    assert main(["check", str(file), "--json"]) == 0
    found: dict[str, list[str]] = json.loads(capsys.readouterr().out)["draws_unseeded"]
    assert [line.split()[1] for line in said] == list(found)
    assert all("`seeded: true`" in line for line in said)
    return found


def test_check_names_what_draws_unseeded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*calls: str, data: str = "Indices", executor: str = "process") -> dict[str, list[str]]:
        return check(tmp_path, capsys, data, *calls, executor=executor)

    erase = "call: {name: erase, function: 'drawing:erase'"
    assert found(f"{erase}}}", executor="thread") == {"erase": ["torch"]}
    assert found("call: {function: 'drawing:by_rng'}", f"{erase}, seeded: true}}", data="Disturbing") == {
        "read": ["np.random", "random", "torch"],
        "call": ["random"],
    }


@pytest.mark.prove
def test_check_names_nothing_that_is_seeded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_rng, erase = "call: {function: 'drawing:by_rng'", "call: {name: erase, function: 'drawing:erase', seeded: true}"
    assert check(tmp_path, capsys, "Indices", f"{by_rng}}}", erase) == {"call": ["random"]}
    assert check(tmp_path, capsys, "Indices", f"{by_rng}, seeded: true}}", erase) == {}
    assert check(tmp_path, capsys, "Disturbing") == {"read": ["np.random", "random", "torch"]}


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("read, call: {function: 'drawing:by_own'}", "made again, the first batch had other values in own:"),
        ("read, call: {function: 'drawing:by_rng'}", "draws from global generators (random)"),
        ("read", None),
    ],
)
def test_check_makes_the_first_batch_twice(
    stages: str, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "drawing.yaml"
    file.write_text(f"source: {{kind: dataset, object: 'drawing:Indices'}}\nstages: [{stages}, batch: {{size: 4}}]\n")
    assert main(["check", str(file)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  random ")]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("kind: dataset, object: 'drawing:by_set'", True),
        ("kind: dataset, object: 'drawing:by_set', args: {is_sorted: true}", False),
        ("kind: iterable, object: 'drawing:by_set'", True),
        ("kind: iterable, object: 'drawing:by_set', args: {is_sorted: true}", False),
    ],
)
@pytest.mark.matrix(1)
def test_check_asks_another_process(
    source: str, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    file = tmp_path / "drawing.yaml"
    file.write_text(f"source: {{{source}}}\nstages: [read, batch: {{size: 4}}]\n")
    assert main(["check", str(file)]) == 0
    assert ("another process saw other items, as of a set" in capsys.readouterr().out) == said
