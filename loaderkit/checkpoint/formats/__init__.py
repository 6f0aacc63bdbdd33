"""Formats of checkpoints, from bytes to entries. They decide nothing about reading."""
