"""Where an endpoint listens: a port of this machine, or an address and a port; each rank of a machine has the next one."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_HERE = "127.0.0.1"
_HOST_AND_PORT = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):)?(?P<port>\d{1,5})")


class ListenAddress(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(value: Any) -> ListenAddress:
    """The address of a port, 9431, or of a text "HOST:PORT"; without a host only this machine reaches it. Raises ValueError."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    match = _HOST_AND_PORT.fullmatch(str(value)) if is_number or isinstance(value, str) else None
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(
            f"a port from 1 to 65535, or HOST:PORT such as 0.0.0.0:9431 for readers on other machines, not {value!r}"
        )
    return ListenAddress((match["host"] or _HERE).strip("[]"), int(match["port"]))
