"""Programs that train a tiny model by the loops that others have written: one module a loop, as users write them."""
