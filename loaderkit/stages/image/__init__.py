"""Stages on pictures, and their kernels."""
