"""The measured facts of a running pipeline: its counters, waits and workers, and what the machine gives."""
