"""How long torchrun lets its ranks live after a signal, whatever was granted to itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEFAULT_S = 30.0  # of torch.distributed.launcher
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_FLAG = re.compile(r"\0--shutdown[-_]timeout[=\0](\d+)\0")


def shutdown_timeout_s(
    signal: str, environment: Mapping[str, str] = os.environ, parent: Path | None = None
) -> float | None:
    """Seconds from `signal` until torchrun kills this process: its --shutdown-timeout. None: torchrun has not started it, or
    does not handle that signal. `parent`: the file with the command line of the process that has started this one."""
    handled = environment.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _SIGNALS).split(",")
    if "TORCHELASTIC_RUN_ID" not in environment or signal not in handled:
        return None
    try:
        command = (parent or Path(f"/proc/{os.getppid()}/cmdline")).read_text(errors="replace")
    except OSError:
        command = ""
    if (match := _FLAG.search(command)) is not None:
        return float(match[1])
    try:
        return float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _DEFAULT_S))
    except ValueError:
        return _DEFAULT_S
