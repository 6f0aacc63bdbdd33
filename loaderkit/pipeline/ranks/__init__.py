"""Decides which share of the samples a rank gets, and lets ranks that need the same batches share one reader."""
