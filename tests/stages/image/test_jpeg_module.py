"""The C module for JPEGs is built where it can be."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loaderkit import native

pytestmark = pytest.mark.matrix(6)

jpeg: Any = native._jpeg
needs_libjpeg = pytest.mark.skipif(jpeg is None, reason="built without libjpeg-turbo")


PROBE = """
#include <stdio.h>
#include <jpeglib.h>
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error
#endif
int main(void) { struct jpeg_decompress_struct one; jpeg_create_decompress(&one); return 0; }
"""


def test_the_module_is_there_where_it_can_be_built(tmp_path: Path) -> None:
    """Its build may fail without a word, and then nothing else here would run."""
    (tmp_path / "probe.c").write_text(PROBE)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler here")
    command = [compiler, str(tmp_path / "probe.c"), "-ljpeg", "-o", str(tmp_path / "probe")]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        assert jpeg is not None
