"""Runs a script up to its first pass over a DataLoader, ports that DataLoader, and ends the script there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.profile.watched.script import on_iteration, script_lines

if TYPE_CHECKING:
    from loaderkit.profile.port.check import Build
    from loaderkit.profile.port.loader import PortedPipeline
    from loaderkit.profile.port.parts import SampleCheck


class ScriptStop(SystemExit):
    """Ends the script at its first pass over a DataLoader; `except Exception` lets it through, and `finally` runs."""


class FirstLoader:
    """The first DataLoader that is iterated over in this process, from `begin` on. `build` is `loaderkit.build`."""

    def __init__(self, script: str, build: Callable[[], Build]) -> None:
        self._script, self._build = script.removesuffix(".py"), build
        self._pid = os.getpid()
        self.name = ""  # of its class, its data set's, and where the script iterates
        self.ported: PortedPipeline | None = None
        self.checked: SampleCheck | None = None
        self.end: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Wait for it; `end` ends that."""
        self.end = on_iteration(self._stop)

    def _stop(self, loader: Any, original: Callable[[Any], Any]) -> Any:
        if os.getpid() != self._pid:
            return original(loader)
        if self.ported is None:
            # What the script reads from may be gone when it has ended.
            from loaderkit.profile.port.check import check_samples
            from loaderkit.profile.port.loader import port_loader
            from loaderkit.profile.watched.watch import name_of

            file, line = script_lines(sys._getframe(2))[0]
            self.name = f"{name_of(loader)} ({Path(file).name}:{line})"
            ported = port_loader(loader, self._script)
            if ported.pipeline is not None:
                ported, self.checked = check_samples(ported, self._build())
            self.ported = ported
        raise ScriptStop
