"""Formats of checkpoints: from bytes to entries. The functions get callables that do the reading."""
