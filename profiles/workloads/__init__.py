"""Pipelines of `pipelines/` against what one would write in their field: `python -m profiles.workloads`."""
