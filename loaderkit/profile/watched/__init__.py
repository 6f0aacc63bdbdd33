"""Watches loops that load without loaderkit: what can be seen from outside of why they wait, as the same stats,
verdicts and reports.

Public: `loaderkit.watch`; `loaderkit watch script.py` runs a script whose DataLoaders are watched.
"""
