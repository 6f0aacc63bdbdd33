"""The formats of data files."""
