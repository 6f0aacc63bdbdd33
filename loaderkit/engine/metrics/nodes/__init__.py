"""Counters for workers on several nodes: what the workers on each node did, and what the network from there to the
trainer carried."""
