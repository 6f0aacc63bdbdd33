"""A sample on its way from its source to its batch: its values, the chunk it is in, and the memory it is written to."""
