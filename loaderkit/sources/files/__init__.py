"""`kind: files`: every file is a sample, or several that belong together are."""
