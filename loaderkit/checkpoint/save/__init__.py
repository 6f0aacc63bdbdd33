"""Writes checkpoints: cut into parts, staged, hashed and written by several threads, and committed as a whole or not at all."""
