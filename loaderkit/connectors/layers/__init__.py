"""Connectors that wrap another one: retries, a disk cache, read-ahead."""
