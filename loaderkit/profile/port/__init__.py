"""A script's DataLoader as a pipeline of loaderkit: what it reads and does by class and attributes, checked against its samples.

Public: `loaderkit port script.py`, `loaderkit watch --compare script.py`.
"""
