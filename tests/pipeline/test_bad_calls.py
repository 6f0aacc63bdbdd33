"""User's functions and data sets that fail: one error that names the stage, the sample and the cause, and nothing left."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bad_files import (  # noqa: F401 - fixtures
    THREADS,
    Items,
    UnluckyError,
    _folder,
    _nothing_left_running,
    assert_names,
    called,
    failure,
    files,
    no_dict,
    other_shape,
    raise_for_seven,
    zero_bytes,
)

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import (
    ConfigError,
    LoaderkitError,
    SourceError,
)

pytestmark = pytest.mark.matrix(8)


def key_error(sample: dict[str, Any]) -> None:
    if sample["__key__"].endswith("07.jpg"):
        _ = sample["depth"]


def other_fields(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "extra": 1} if sample["__key__"].endswith("07.jpg") else sample


def leave(sample: dict[str, Any]) -> None:
    if sample["__key__"].endswith("07.jpg"):
        sys.exit("a library gave up")


def end_generator(sample: dict[str, Any]) -> None:
    if sample["__key__"].endswith("07.jpg"):
        raise GeneratorExit


@pytest.mark.parametrize("executor", THREADS)
@pytest.mark.parametrize(
    ("function", "stage", "said", "cause"),
    [
        (raise_for_seven, "mine", "seven", UnluckyError),
        (key_error, "mine", "KeyError('depth')", KeyError),
        (leave, "mine", "SystemExit('a library gave up')", SystemExit),
        (end_generator, "mine", "GeneratorExit()", GeneratorExit),
        (no_dict, "mine", "returned Tensor; it must return a dict", TypeError),
        (other_shape, "batch", "[3, 10, 32]", ValueError),
        (other_fields, "batch", "'extra'", ValueError),
    ],
)
def test_a_call_that_fails_on_a_sample(
    function: Callable[..., Any], stage: str, said: str, cause: type[BaseException], executor: str, folder: Path
) -> None:
    error = failure(loaderkit.build(called(folder, function, executor)))
    assert_names(error, stage, "b/07.jpg", folder / "b" / "07.jpg", said)
    assert type(error.__cause__) is cause
    if stage == "batch":
        assert "'a/00.jpg'" in str(error), "both samples should be named"


def fail_on_batch(batch: dict[str, Any]) -> None:
    if "b/07.jpg" in batch["__key__"]:
        raise UnluckyError("seven")


@pytest.mark.parametrize("executor", THREADS)
def test_a_call_that_fails_on_a_batch(executor: str, folder: Path) -> None:
    made = files(folder, executor).call(fail_on_batch, name="late")
    error = failure(loaderkit.build(made))
    assert error.stage == "late"
    assert "batch 2 of epoch 0" in str(error)
    assert "seven" in str(error)
    assert isinstance(error.__cause__, UnluckyError)


def leave_on_batch(batch: dict[str, Any]) -> None:
    if "b/07.jpg" in batch["__key__"]:
        sys.exit(0)


@pytest.mark.parametrize("executor", THREADS)
def test_a_call_that_leaves_on_a_batch(executor: str, folder: Path) -> None:
    error = failure(loaderkit.build(files(folder, executor).call(leave_on_batch, name="late")))
    assert error.stage == "late"
    assert "SystemExit(0)" in str(error)


def test_what_leaves_is_skipped_like_any_bad_sample(folder: Path) -> None:
    with loaderkit.build(called(folder, leave, "thread", on_bad_sample="skip")) as loader:
        assert "b/07.jpg" not in [key for batch in loader for key in batch["__key__"]]


def test_a_call_that_cannot_be_imported(folder: Path) -> None:
    for path in ("no_such_module:f", "json:no_such_function", "json:decoder"):
        with pytest.raises(ConfigError, match=rf"mine.*{path}"):
            loaderkit.build(Pipeline.files(folder).read().call(path, name="mine").batch(4))


@pytest.mark.parametrize("executor", THREADS)
def test_a_data_set_object_that_raises(executor: Any) -> None:
    made = Pipeline.dataset(Items(bad=(13,))).shuffle("none").read().batch(6).prefetch(executor=executor)
    error = failure(loaderkit.build(made))
    assert_names(error, "read", "13", "Items", "item 13")
    assert isinstance(error.__cause__, UnluckyError)


class Leaving(Items):
    def __getitem__(self, index: int) -> Any:
        return sys.exit() if index == 13 else super().__getitem__(index)


class LeavingTogether(Leaving):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("executor", [*THREADS, "process"])
@pytest.mark.parametrize("items", [Leaving, LeavingTogether])
def test_a_data_set_object_that_leaves(items: type[Items], executor: Any) -> None:
    made = Pipeline.dataset(items()).shuffle("none").read().batch(6).prefetch(executor=executor)
    error = failure(loaderkit.build(made))
    assert_names(error, "read", "13", items.__name__, "SystemExit")
    assert isinstance(error.__cause__, SystemExit)


def test_data_set_objects_of_no_use() -> None:
    class Empty(Items):
        def __len__(self) -> int:
            return 0

    with pytest.raises(SourceError, match="Empty"):
        loaderkit.build(Pipeline.dataset(Empty()).read().batch(4))
    with pytest.raises(LoaderkitError, match="no_such_module"):
        loaderkit.build(Pipeline.dataset("no_such_module:make").read().batch(4))


def raising_factory() -> Items:
    raise UnluckyError("no data today")


def leaving_factory() -> Items:
    sys.exit(3)


class Sized(Items):
    def __init__(self, size: Any) -> None:
        self.size = size

    def __len__(self) -> int:
        if self.size is None:
            raise UnluckyError("who knows")
        return self.size  # type: ignore[no-any-return]


READY = Items()
OWN = "test_bad_calls"


@pytest.mark.parametrize(
    ("name", "args", "said", "cause"),
    [
        (f"{OWN}:raising_factory", {}, r"called with \(\), failed: UnluckyError: no data today", UnluckyError),
        (f"{OWN}:leaving_factory", {}, "SystemExit: 3", SystemExit),
        (f"{OWN}:Sized", {"sise": 3}, r"called with \(sise=3\), failed: TypeError.*'sise'", TypeError),
        (f"{OWN}:Sized", {"size": -1}, r"len\(\) of the Sized failed \(ValueError", ValueError),
        (f"{OWN}:Sized", {"size": 2.5}, r"len\(\) of the Sized failed \(TypeError", TypeError),
        (f"{OWN}:Sized", {"size": None}, r"len\(\) of the Sized failed \(UnluckyError: who knows", UnluckyError),
        (f"{OWN}:READY", {"num": 3}, r"source\.args: .* is a Items, not.*num", type(None)),
        (".mod:x", {}, "cannot be imported: TypeError", TypeError),
        ("raising_module:make", {}, "cannot be imported: ValueError: not today", ValueError),
        ("broken_module:make", {}, "cannot be imported: SyntaxError", SyntaxError),
        ("leaving_module:make", {}, "cannot be imported: SystemExit", SystemExit),
    ],
)
def test_objects_that_cannot_be_made(
    name: str,
    args: dict[str, Any],
    said: str,
    cause: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One kind of error, with the cause chained, whatever the user's code raises."""
    (tmp_path / "raising_module.py").write_text("raise ValueError('not today')")
    (tmp_path / "broken_module.py").write_text("def make(:")
    (tmp_path / "leaving_module.py").write_text("import sys; sys.exit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        loaderkit.build(Pipeline.dataset(name, args=args).read().batch(4))
    assert "source." in str(caught.value)
    assert name in str(caught.value) or "Sized" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)
    if "module" in name or name.startswith("."):
        with pytest.raises(ConfigError, match=r"stages\.mine\.function.*cannot be imported"):
            loaderkit.build(Pipeline.dataset(READY).read().call(name, name="mine").batch(4))


@pytest.mark.parametrize("executor", THREADS)
def test_every_sample_is_bad(executor: str, folder: Path) -> None:
    for place in folder.rglob("*.jpg"):
        zero_bytes(place)
    for policy in ("raise", "skip", "replace"):
        made = files(folder, executor, on_bad_sample=policy, max_bad_samples=1000)
        error = failure(loaderkit.build(made))
        assert "0 bytes" in str(error)


def test_two_threads_that_ask_for_batches_at_once() -> None:
    """One of them is told; they would have got some batches twice and others never, without a word."""
    raised: list[BaseException | None] = []

    class Asks(Items):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and not raised:  # the main thread waits for this item
                with ThreadPoolExecutor(1) as other:
                    raised.append(other.submit(next, batches).exception())
            return super().__getitem__(index)

    pipeline = Pipeline.dataset(Asks()).shuffle(False).read().batch(4).prefetch(executor="inline")
    with loaderkit.build(pipeline) as loader:
        batches = iter(loader)
        assert [index for batch in batches for index in batch["x"].tolist()] == list(range(len(Asks())))
    assert isinstance(raised[0], LoaderkitError)
    assert "one thread at a time" in str(raised[0])
