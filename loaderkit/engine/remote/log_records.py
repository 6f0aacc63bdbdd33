"""Log records of other processes, which the trainer's loggers handle."""

from __future__ import annotations

import logging
from typing import Any

_TEXT_CHARACTERS = 2**14
logger = logging.getLogger("loaderkit")


def pack_record(record: logging.LogRecord) -> dict[str, Any]:
    """A record as a dict for `relay`, with its text made and bounded in length."""
    attributes = {**record.__dict__, "msg": record.getMessage()[:_TEXT_CHARACTERS], "args": None, "exc_info": None}
    if record.exc_info:
        attributes["exc_text"] = logging.Formatter().formatException(record.exc_info)[:_TEXT_CHARACTERS]
    return attributes


def relay(attributes: dict[str, Any]) -> None:
    """Log a record of another process as if it had been logged here."""
    record = logging.makeLogRecord(attributes)
    if logger.isEnabledFor(record.levelno):
        logging.getLogger(record.name).handle(record)
