"""Delivers batches to the loop: the iterator, batches by number, and what is recorded of batches as they are delivered."""
