"""What is done to samples and batches: one module a stage."""
