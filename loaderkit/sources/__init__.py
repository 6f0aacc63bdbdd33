"""Which samples there are and where their bytes lie: one module a kind of source, all with `loaderkit.types.Source`."""
