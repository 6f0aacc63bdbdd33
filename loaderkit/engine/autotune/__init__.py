"""What changes while the engine runs: the number of workers, the size of a chunk, how many run at once."""
