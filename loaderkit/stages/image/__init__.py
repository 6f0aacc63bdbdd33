"""Stages that act on pictures, and their kernels."""
