"""Finds a checkpoint, tells its format, reads its contents and its manifest."""
