"""Sources of records of one size: a sample is found by arithmetic, and a chunk of them is read by one call."""
