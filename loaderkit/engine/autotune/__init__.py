"""What changes while the engine runs: the number of workers, the size of a chunk, and how many workers run at once."""
