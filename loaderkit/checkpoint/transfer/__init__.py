"""Moves byte ranges of a checkpoint into tensors, on the engine."""
