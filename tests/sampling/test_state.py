"""Which differences a saved state may have from the loader, and how they are accepted."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderkit.errors import ConfigError, StateError
from loaderkit.sampling.state import State

NOW = {
    "data": "d",
    "order": "global",
    "stages": "read > flip > batch",
    "stages.flip": "flip {}",
    "stages.pack": "pack {}",
}
CHANGES = {
    "data": "e",
    "order": "none",
    "stages": "read > batch",
    "stages.flip": 'flip {"p": 1}',
    "stages.pack": 'pack {"length": 4}',
}
parts = st.sets(st.sampled_from([*CHANGES, "seed"]))


def changed(differences: set[str], position: int = 3) -> State:
    fingerprint = {**NOW, **{part: CHANGES[part] for part in differences if part in CHANGES}}
    return State(2, position, 1 if "seed" in differences else 0, fingerprint)


def check(state: State, accept: object = ()) -> None:
    state.check(seed=0, fingerprint=NOW, num_samples=lambda epoch: 10, accept=accept)  # type: ignore[arg-type]


@given(differences=parts, accept=parts)
def test_all_differences_must_be_accepted(differences: set[str], accept: set[str]) -> None:
    covered = accept | {part for part in CHANGES if part.startswith("stages.") and "stages" in accept}
    if differences <= covered:
        check(changed(differences), accept)
        return
    with pytest.raises(StateError) as caught:
        check(changed(differences), accept)
    said = str(caught.value)
    for part in [*CHANGES, "seed"]:
        assert (f" {part}: the state has" in said) == (part in differences - covered)
    moves = bool((differences - covered) & {"data", "order", "seed", "stages.pack"})
    assert ("repeat or skip samples" in said) == moves
    assert ("the right samples would come" in said) == (not moves)
    # The error names all that has to be accepted, also what was already.
    assert said.endswith(
        f"at position 3 of epoch 2 of this loader's own order: load_state_dict(state, accept={sorted(differences)})"
    )
    check(changed(differences), sorted(differences))


def test_it_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "loaderkit"):
        check(changed({"seed", "stages.flip"}), ["seed", "stages"])
        check(changed({"stages.flip"}), "stages.flip")
        check(changed(set()), ["seed"])
    first, second = (record.getMessage() for record in caplog.records)
    assert "differs in stages.flip, seed, as accepted" in first
    assert "samples of the epoch may come twice or not at all" in first
    assert "not at all" not in second


def test_a_position_behind_the_end() -> None:
    state = changed({"data"}, position=11)
    with pytest.raises(StateError, match=r"position: the state has 11, the data set only 10 .*\['data', 'position'\]"):
        check(state, ["data"])
    check(state, ["data", "position"])
    with pytest.raises(StateError, match="the data set only 10"):
        check(changed(set(), position=11))


def test_a_name_that_no_state_has() -> None:
    with pytest.raises(ConfigError, match=r"accept names 'sead', which no state has: .*seed"):
        check(changed({"seed"}), ["sead"])


def test_later_weights_need_no_acceptance() -> None:
    state = State(0, 5, 0, {**NOW, "mix": "first 0:aa"})
    with pytest.raises(StateError, match=r"add them to `mix\.changes`, at a position that has not come yet"):
        state.check(seed=0, fingerprint={**NOW, "mix": "first 0:bb"}, num_samples=lambda epoch: 10)


UNITS = {
    "samples": {},
    "sequences": {"stages.pack": 'pack {"length": 8}'},
    "batches": {"batches": "64 tokens of 'tokens', pad, window 9, cost none", "stages.pack": 'pack {"length": 8}'},
}


@pytest.mark.parametrize("before", UNITS)
@pytest.mark.parametrize("now", UNITS)
def test_a_change_of_unit_cannot_be_accepted(before: str, now: str) -> None:
    """A position in samples is none in batches; the beginning of an epoch is one in all."""
    state = State(2, 3, 0, {"data": "x", **UNITS[before]})
    fingerprint = {"data": "x", **UNITS[now]}
    accept = ["batches", "stages"]
    if before != now:
        for accepted in ([], accept):
            with pytest.raises(StateError, match=rf"counts {before}, and this loader {now}: .* set_epoch\(3\)"):
                state.check(seed=0, fingerprint=fingerprint, num_samples=lambda epoch: 10, accept=accepted)
    State(2, 0, 0, state.fingerprint).check(
        seed=0, fingerprint=fingerprint, num_samples=lambda epoch: 10, accept=accept
    )
