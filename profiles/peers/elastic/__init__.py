"""Peers that resume at another number of ranks: one module each, run in the peer's own environment by `child`."""
