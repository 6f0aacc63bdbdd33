"""Makes batches: which samples each one takes, their memory, and the dict that the user gets."""
