"""Decides which rank writes which bytes of a checkpoint: each byte is written once, and all ranks write about as many.
Arithmetic only."""
