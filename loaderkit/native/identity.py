"""Identifies the loaderkit that a process has, since processes make the same batches only if all have the same."""

from __future__ import annotations

import logging
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from loaderkit import native
from loaderkit._internal.version import __version__
from loaderkit.errors import ConfigError

_ROOT = Path(native.__file__).parents[1]
logger = logging.getLogger("loaderkit")


class Identity(NamedTuple):
    """`digest` covers all Python sources; `modules` are the optional C modules that are there."""

    version: str
    folder: str
    digest: str
    modules: tuple[str, ...]
    resamples: bool  # in C, which a CPU may not allow: within a level of torch


@cache
def identity() -> Identity:
    """The identity of this process; computed once, in 30 ms."""
    digest = blake2b(digest_size=16)
    for path in sorted(_ROOT.rglob("*.py")):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode())
        digest.update(path.read_bytes())
    modules = ("_jpeg",) if native.HAS_JPEG else ()
    return Identity(__version__, str(_ROOT), digest.hexdigest(), modules, native.CAN_RESAMPLE)


def check_same(program: Identity, here: Identity | None = None) -> None:
    """Raise ConfigError if this process's loaderkit (`here`) differs from the one of the program it works for, and warn
    if its CPU resizes in another way: pictures would differ by the process that makes them."""
    here = here or identity()
    if here.digest != program.digest:
        raise ConfigError(
            f"loaderkit {here.version} in {here.folder}, where batches are to be made, is another than {program.version} in "
            f"{program.folder}, which the program has: batches would differ by who makes them. Install the same one there, and "
            "look for a second copy in sys.path"
        )
    for few, many, where in ((here, program, "where batches are to be made"), (program, here, "which the program has")):
        if missing := sorted({*many.modules} - {*few.modules}):
            raise ConfigError(
                f"loaderkit in {few.folder}, {where}, lacks the C modules {', '.join(missing)}, which the other side has: a "
                "damaged JPEG could be refused by one and read by the other. Install the same wheel there, or for _jpeg "
                "libjpeg-turbo's headers and loaderkit once more"
            )
    if here.resamples != program.resamples:
        logger.warning(
            "of the CPUs of the program and of those that make batches only one kind has AVX2: resized pictures may differ by "
            "a level by where they are made"
        )
