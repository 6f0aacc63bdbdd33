"""Volumes: crops and flips of arrays of any dimensions, and NIfTI."""
