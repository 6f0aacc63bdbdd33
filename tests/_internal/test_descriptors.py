"""Descriptors of memory that prints must not reach."""

from __future__ import annotations

import subprocess
import sys

_MAPS_WHILE_OTHERS_OPEN_FILES = """
import os, threading
from contextlib import suppress
from loaderkit._internal.system.descriptors import mapped, memory_file

os.close(1)
is_over = threading.Event()

def churn():
    while not is_over.is_set():
        os.close(os.open(os.devnull, os.O_RDONLY))

threads = [threading.Thread(target=churn) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    for _ in range(2000):
        with memory_file("x") as file:
            os.ftruncate(file.fileno(), 4096)
            with mapped(file.fileno()):
                for number in range(3):
                    with suppress(OSError):
                        assert not os.path.samestat(os.fstat(number), os.fstat(file.fileno())), number
finally:
    is_over.set()
"""


def test_a_mapping_never_has_a_number_of_stdio() -> None:
    """Also while other threads open and close files, which take such a number for a moment."""
    command = [sys.executable, "-c", _MAPS_WHILE_OTHERS_OPEN_FILES]
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
