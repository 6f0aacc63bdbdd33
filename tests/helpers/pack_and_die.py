"""Packs a pipeline in child processes that kill themselves when, for the n-th time, a file below --out is opened, renamed or
removed; n is drawn anew each time. In the end one gets through.

python pack_and_die.py PIPELINE FORMAT EXPECTED OUT SEED NUM      prints the calls of a run, and the codes of all by JSON
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from packed_shards import packed

import loaderkit
from loaderkit.errors import SourceError

COUNTED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def run(pipeline: str, form: str, out: str, at: int) -> int:
    """Pack, dying at call `at`, 0: never. The number of calls."""
    num_calls = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal num_calls
        if event in COUNTED and isinstance(arguments[0], str) and arguments[0].startswith(out):
            num_calls += 1
            if num_calls == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    packed(pipeline, out, format=form, shard_bytes=25_000)
    return num_calls


def in_child(function: Any, *arguments: Any) -> int:
    """What a function returns in a child process, or minus the number of the signal that has killed it."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, str(function(*arguments)).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as answer:
        text = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code or int(text)


def refuses_to_read(out: str) -> int:
    """1 if `kind: tar` refuses what is there as unfinished."""
    for include in ("*.tar", "shard-*.tar", "shard-{000000..000001}.tar", ["shard-000000.tar"]):
        source = {"kind": "tar", "url": out, "include": include}
        try:
            loaderkit.build({"source": source, "stages": ["read", {"batch": {"size": 1}}]}).close()
        except SourceError as error:
            if "being written, or `loaderkit pack` was cut off" in str(error):
                continue
        return 0
    return 1


def main(pipeline: str, form: str, expected: str, out: str, seed: str, num: str) -> None:
    rng = random.Random(seed)
    num_calls = in_child(run, pipeline, form, expected, 0)
    codes = []
    for at in [*(rng.randrange(1, num_calls) for _ in range(int(num))), 0]:
        codes.append(in_child(run, pipeline, form, out, at))
        has_begun = (Path(out) / ".loaderkit-shards" / "plan.json").exists()
        if codes[-1] < 0 and has_begun and form == "tar":
            assert in_child(refuses_to_read, out)
    print(json.dumps({"num_calls": num_calls, "codes": codes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
