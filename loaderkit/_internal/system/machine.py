"""Which machine this is."""

from __future__ import annotations

import socket

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def machine() -> str:
    """An identity of this machine, the same in all of its containers, which share its memory."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
