"""Moves byte ranges into tensors, on the engine."""
