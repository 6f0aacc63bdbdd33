"""Which samples there are, and where their bytes lie."""
