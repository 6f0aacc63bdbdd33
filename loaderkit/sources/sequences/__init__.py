"""Sources of sequences: documents of tokens in one file, found through an index of where they end."""
