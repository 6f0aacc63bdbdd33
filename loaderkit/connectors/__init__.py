"""Where bytes are: one module a kind of store, all with the contract `loaderkit.types.Connector`."""
