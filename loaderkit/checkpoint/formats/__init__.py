"""Formats of checkpoints, from bytes to entries. Callables given to them do the reading."""
