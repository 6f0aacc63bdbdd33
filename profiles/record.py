"""Where a measurement is kept, and what is said of the machine it was made on."""

from __future__ import annotations

import json
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from loaderkit._internal.system.cgroups import num_cpus


def record(out: Path | None, what: str, **found: Any) -> None:
    """Write `<what>-<cpus>cpu-<date>.json` below `out`, if there is such; with the device, where `found` names one."""
    if out is None:
        return
    device = str(found.get("device", "cpu")).lower()
    what = what if device == "cpu" else f"{what}-{re.sub('[^a-z0-9]+', '-', device)}"
    path = out / f"{what}-{num_cpus()}cpu-{datetime.now(UTC).date().isoformat()}.json"
    facts = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cpus": num_cpus(), **facts, **found}, indent=1) + "\n")
    print(f"written to {path}")
