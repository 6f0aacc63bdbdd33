"""A stage of pipelines in other processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def dies_once(sample: dict[str, Any], folder: str) -> None:
    """Kill this process, the first time that anything comes."""
    died = Path(folder, "died")
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
