"""Why an actor has ended: how it ended, the likely cause, and what to do."""

from __future__ import annotations

import re

from ray import exceptions

from loaderkit._internal.config import keys
from loaderkit.engine.restarts import Death

_DETAIL = "Worker exit detail: "
_NOT_MADE = "error raised in its creation task"
_CODE_OF_LOSS = "connection error code 2"  # the process was there, and is not any more


def actor_death(who: str, error: BaseException | None, *, is_early: bool) -> Death:
    """How an actor ended, by the `error` that Ray raised for a call to it, or None if it does not answer. `is_early`:
    it had not begun to make batches."""
    may_pass = True
    text = str(error)
    if isinstance(error, exceptions.OutOfMemoryError) or "memory" in _first_line(text).lower():
        what = "was killed by Ray, as the memory of its node was short"
        fix = f"{keys.LESS_MEMORY}, or place fewer actors on a node ({keys.RAY}.num_cpus)"
    elif isinstance(error, exceptions.RuntimeEnvSetupError):
        what, may_pass = f"could not start: {_first_line(text)}", False
        fix = "see the runtime environment that ray.init was given"
    elif _NOT_MADE in text:
        place = re.search(r"ip=([^,)\s]+)", text)
        where = "" if place is None else f" on node {place[1]}"
        what, may_pass = f"could not be made{where} ({text.strip().splitlines()[-1]})", False
        fix = "install the same loaderkit, and what your code imports, on all nodes"
    elif isinstance(error, exceptions.ActorUnschedulableError):
        what, may_pass = f"could not be placed: {_first_line(text)}", False
        fix = f"ask for less in {keys.RAY}"
    elif isinstance(error, exceptions.ObjectLostError):
        what, fix = (
            "was lost with batches that it had finished",
            "its node was lost, or Ray's object store is too small",
        )
    elif isinstance(error, exceptions.ActorUnavailableError) or _is_of_node(text):
        what, fix = "was lost with its node, or with the way to it", "see Ray's log of that node"
    elif error is None:
        what, fix = "does not answer and was ended", "look for a stage that blocks the whole interpreter"
    else:
        what, fix = (
            f"died ({_detail(text)})",
            (
                "another program killed it, the system was out of memory (see dmesg on its node), or a library crashed or "
                "exited (see its stderr in Ray's logs)"
            ),
        )
    return Death(who, what, fix, is_early=is_early, may_pass=may_pass)


def _is_of_node(text: str) -> bool:
    return "node" in text and "dead" in text.lower() and _DETAIL not in text


def _detail(text: str) -> str:
    """Ray's words for how a process ended, without its list of usual causes and without what it says of every end."""
    place = text.find(_DETAIL)
    if place < 0:
        first, *others = text.strip().splitlines() or [""]
        said = [line for line in others if line.strip() and not line.startswith("\t")]  # behind fields of the actor's
        return (said or [first])[0].rstrip(".")
    detail = text[place + len(_DETAIL) :].partition(" Some common causes")[0].strip()
    return "its process has ended without a word" if _CODE_OF_LOSS in detail else detail.splitlines()[0].rstrip(".")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")
