"""A script's DataLoader as a pipeline of loaderkit: recognised by classes and their attributes, and checked by its samples.

Public: `loaderkit port script.py`, `loaderkit watch --compare script.py`.
"""
