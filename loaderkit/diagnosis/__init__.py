"""From facts to a verdict: what limits a loop, how sure that is, what says so, and what to set. Knows stages and settings by
name, and runs nothing.

Public: `Stats`, which a loader gives; `Verdict`, `Setting`. `watched/` is the same for loops that load by something else.
"""

from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import Setting, Verdict

__all__ = ["Setting", "Stats", "Verdict"]
