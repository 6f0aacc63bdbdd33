"""Which share of the samples a rank gets, and how ranks that need the same batches share one reader."""
