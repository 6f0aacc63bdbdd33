"""Runs stages on work items, in order and within a budget of memory, and measures who waits for whom."""
