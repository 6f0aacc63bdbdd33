"""Experiments: run the loader on purpose to find out what a measurement alone does not show."""
