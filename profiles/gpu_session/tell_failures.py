"""A plugin of pytest (`-p profiles.gpu_session.tell_failures`): failures are told at once, as a run may be ended."""

from __future__ import annotations

import re
from typing import Any

_BEGIN, _END = "===== why", "===== that is why"
_LONGEST = 1000  # characters of each, from the end, where the error stands
_FAILURE = re.compile(rf"^{_BEGIN} ([^\n]*)\n(.*?)\n{_END}$", re.MULTILINE | re.DOTALL)


def pytest_configure(config: Any) -> None:
    """Of xdist's processes only the one that hears of all tests tells."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Teller(config), "tell-failures")


class _Teller:
    def __init__(self, config: Any) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(f"{_BEGIN} {report.nodeid}\n{report.longreprtext}\n{_END}")
            reporter.flush()


def failures_in(said: str) -> dict[str, str]:
    """The end of each failure's text, by test."""
    return {name: text[-_LONGEST:] for name, text in _FAILURE.findall(said)}
