"""States made up by hypothesis, saved by some ranks and loaded by others: equal to the last bit, by torch's reader and ours."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from checkpoint_states import same
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from made_up_states import State, load_states, save_states, states, whole
from rank_programs import run_ranks

import loaderkit

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("num_saving", "all_loading"),
    [
        (2, (1, 3)),
        pytest.param(1, (2,), marks=pytest.mark.prove),
        pytest.param(4, (1, 2, 3, 8), marks=pytest.mark.prove),
        pytest.param(2, (1, 2, 3, 8), marks=pytest.mark.prove),
        pytest.param(1, (1, 2, 3, 8), marks=pytest.mark.prove),
    ],
)
def test_saved_by_some_and_loaded_by_others(num_saving: int, all_loading: tuple[int, ...]) -> None:
    # An example is a start of processes, so it has many states, and none is sought that is smaller. The first is the simplest.
    @given(st.lists(states(), min_size=6, max_size=6))
    @settings(max_examples=1 if len(all_loading) < 4 else 5, phases=[Phase.generate], database=None)
    def check(made_up: list[State]) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            assert run_ranks(save_states, num_saving, folder, "saving", made_up) == [0] * num_saving
            for number, state in enumerate(made_up):
                for path in (folder / f"written-{number}", folder / "run" / f"step-{number:010d}"):
                    restored = loaderkit.restore(path, verify=True)
                    for index, item in enumerate(state.tensors):
                        assert same(restored[f"model.w{index}"], whole(item))
                    assert same(restored["held.tensor"], whole(state.held))
            for num in all_loading:
                assert run_ranks(load_states, num, folder, f"loading-{num}", made_up) == [0] * num

    check()
