"""Finds a checkpoint, tells its format, reads its table of contents and its manifest."""
