"""Volumes: crops and flips of arrays with any number of dimensions, and NIfTI files."""
