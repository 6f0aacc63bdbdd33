"""Turns measurements of a run into a report and compares reports.

Public: `Report`, `compare_reports`; `with loader.profile() as report` records one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit._internal.imports import public_names

if TYPE_CHECKING:
    from loaderkit.profile.compare import compare_reports
    from loaderkit.profile.report import Report

__all__ = ["Report", "compare_reports"]
__getattr__ = public_names(
    __name__, {"Report": "loaderkit.profile.report", "compare_reports": "loaderkit.profile.compare"}
)
