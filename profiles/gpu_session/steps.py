"""The steps of a session, the most valuable first; each has a limit, so that none takes the time of those behind it."""

from __future__ import annotations

from dataclasses import dataclass

BUDGET_S = {"a": 360.0, "b": 240.0}
"""How long a part takes at most."""
UNPACK, UNPACK_DALI = "unpack", "unpack-dali"
"""The steps of a session that is given a bundle: profiles/gpu_bundle/unpack.py."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """`function` is "module:function" in this package; `limit_s` is how long its process may run."""

    name: str
    part: str
    limit_s: float
    function: str


def _step(part: str, limit_s: float, name: str, function: str) -> Step:
    return Step(name=name, part=part, limit_s=limit_s, function=function)


STEPS = (
    _step("a", 15, UNPACK, ""),
    _step("a", 40, "facts", "machine:facts"),
    _step("a", 56, "tests", "marked_tests:without_dali"),
    _step("a", 15, "copies", "copies:measure"),
    _step("a", 45, "loader", "loading:measure"),
    _step("a", 42, "restore", "restoring:measure"),
    _step("a", 40, "save", "saving:measure"),
    _step("a", 20, "nvjpeg", "decoding:measure"),
    _step("a", 25, "ends", "ends:measure"),
    _step("a", 30, "rebuilds", "rebuilds:measure"),
    _step("a", 30, "train", "training:measure"),
    _step("b", 18, UNPACK_DALI, ""),
    _step("b", 26, "dali", "dali_import:measure"),
    _step("b", 26, "pictures", "pictures:measure"),
    _step("b", 42, "dali-tests", "marked_tests:with_dali"),
    _step("b", 13, "levels", "levels:measure"),
    _step("b", 52, "by-hand", "by_hand:measure"),
    _step("b", 18, "order", "order:measure"),
    _step("b", 13, "damaged", "damaged:measure"),
    _step("b", 28, "soak", "soak:measure"),
)
