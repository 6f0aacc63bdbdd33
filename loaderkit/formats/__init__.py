"""What bytes mean: one module a file format, none of which knows where the bytes come from."""
