"""A second process that writes copies of a state: shared memory for the copies, and calls of functions in that process."""
