"""Reads config files and names what is wrong in them: file, line, key and the nearest right name."""
