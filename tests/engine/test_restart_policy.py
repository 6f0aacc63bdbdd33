"""How often workers are started again, and what is said of it."""

from __future__ import annotations

import pickle

from loaderkit.engine.restarts import Death, Restarts

DEATH = Death("the worker", "was killed", "look for who did it", -9)


def keys_at(epoch: int, position: int) -> list[str]:
    return [f"{epoch}/{position + number}" for number in range(20)]


class TestRestarts:
    def test_are_counted_in_all(self) -> None:
        restarts = Restarts(2, keys_at=keys_at)
        assert [restarts.refuse(DEATH, (0, 8 * number)) for number in range(2)] == [None, None]
        refused = restarts.refuse(DEATH, (1, 0))
        assert "All 2 restarts of this run" in str(refused)
        assert "(samples '1/0', '1/1', " in str(refused)
        assert "'1/7' and 12 more)" in str(refused)
        assert refused is not None
        assert pickle.loads(pickle.dumps(refused)).samples == tuple(keys_at(1, 0))
        assert refused.exit_code == -9
        assert restarts.num == 2

    def test_end_with_the_second_death_at_a_batch(self) -> None:
        restarts = Restarts(100, keys_at=keys_at)
        assert restarts.refuse(DEATH, (0, 8)) is None
        assert restarts.refuse(DEATH, (1, 8)) is None
        assert restarts.refuse(DEATH, (0, 16)) is None
        assert "and is the second that this batch has ended" in str(restarts.refuse(DEATH, (0, 8)))

    def test_early_deaths_blame_no_batch(self) -> None:
        restarts = Restarts(2, keys_at=keys_at)
        early = DEATH._replace(is_early=True)
        assert restarts.refuse(early, (0, 8)) is None
        assert "batch" not in restarts.describe(early, (0, 8), "another").partition(";")[0].partition(":")[0]
        assert restarts.refuse(DEATH, (0, 8)) is None
        refused = restarts.refuse(early, (0, 8))
        assert refused is not None
        assert refused.samples == ()
        assert "while" not in str(refused)

    def test_none_where_the_next_one_would_end_in_the_same_way(self) -> None:
        restarts = Restarts(2)
        assert restarts.refuse(DEATH._replace(is_early=True, may_pass=False), (0, 0)) is not None
        assert restarts.num == 0

    def test_none_where_batches_cannot_be_made_again(self) -> None:
        refused = Restarts(2, impossible="It streams").refuse(DEATH, (0, 0))
        assert "look for who did it. It streams. The loader's state is unharmed" in str(refused)

    def test_names_that_cannot_be_found_are_left_out(self) -> None:
        def fails(epoch: int, position: int) -> list[str]:
            raise KeyError(position)

        restarts = Restarts(1, keys_at=fails)
        restarts.refuse(DEATH, (0, 8))
        refused = restarts.refuse(DEATH, (0, 8))
        assert refused is not None
        assert refused.samples == ()
        assert "samples" not in str(refused)

    def test_what_is_left_is_said(self) -> None:
        restarts = Restarts(3)
        restarts.refuse(DEATH, (2, 64))
        assert restarts.describe(DEATH, (2, 64), "Another one") == (
            "the worker was killed before it had finished the batch at position 64 of epoch 2: look for who did it. "
            "Another one makes its batches again from there on; 2 of 3 restarts (prefetch.restarts) are left in this run"
        )
