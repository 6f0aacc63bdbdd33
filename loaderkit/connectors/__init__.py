"""Where bytes are: one module a kind of store, which fills memory given to it, or raises."""
