"""Predicts what a change would bring, without running it."""
