"""Connectors around connectors: retries, a disk cache, read-ahead."""
