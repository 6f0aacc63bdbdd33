"""Finds a checkpoint, recognises its format, reads its contents and its manifest."""
