"""Turns measurements of a run into a report and compares reports.

Public: `Report`, `compare`; `with loader.profile() as report` records one.
"""

from loaderkit.profile.compare import compare_reports as compare
from loaderkit.profile.report import Report

__all__ = ["Report", "compare"]
