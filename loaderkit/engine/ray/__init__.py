"""The engine in actors of a Ray cluster: placement, transport and the object store are Ray's. Imported only where asked for."""
