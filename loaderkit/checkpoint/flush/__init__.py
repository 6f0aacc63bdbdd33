"""Another process that writes copies of a state: shared memory for the copies, and calls of a function there."""
