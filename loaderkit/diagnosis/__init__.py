"""From measured facts to a verdict: what limits a loop, how sure that is, what the evidence is, and what to set. It
knows stages and settings by name, and runs nothing.

Public: `Stats`, which a loader gives; `Verdict`, `Setting`. `watched/` does the same for loops that load without loaderkit.
"""

from loaderkit.diagnosis.stats import Stats
from loaderkit.diagnosis.verdict import Setting, Verdict

__all__ = ["Setting", "Stats", "Verdict"]
