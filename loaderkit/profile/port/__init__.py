"""Turns a script's DataLoader into a pipeline of loaderkit. Objects are recognised by their classes and attributes, and
the result is checked by comparing samples.

Public: `loaderkit port script.py`, `loaderkit watch --compare script.py`.
"""
