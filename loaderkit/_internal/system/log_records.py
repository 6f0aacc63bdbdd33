"""Passes log records of other processes to the loggers of the trainer's process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

_TEXT_CHARACTERS = 2**14
logger = logging.getLogger("loaderkit")


def forward_logs(send: Callable[[dict[str, Any]], object], level: int) -> None:
    """From now on this process's records go to `send`, each as a dict for `relay`, with its text formatted and bounded
    in length. A record that cannot be sent is printed to stderr rather than lost."""
    logger.addHandler(_Forwarder(send))
    logger.setLevel(level)
    logger.propagate = False


def relay(attributes: dict[str, Any]) -> None:
    """Log a record of another process as if it had been logged here."""
    record = logging.makeLogRecord(attributes)
    if logger.isEnabledFor(record.levelno):
        logging.getLogger(record.name).handle(record)


class _Forwarder(logging.Handler):
    def __init__(self, send: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()[:_TEXT_CHARACTERS]
        attributes = {**record.__dict__, "msg": text, "args": None, "exc_info": None}
        if record.exc_info:
            attributes["exc_text"] = logging.Formatter().formatException(record.exc_info)[:_TEXT_CHARACTERS]
        try:
            self._send(attributes)
        except Exception:
            print(f"loaderkit: {text}", file=sys.stderr)  # noqa: T201
