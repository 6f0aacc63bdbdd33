"""The version of loaderkit."""

__version__ = "0.1.0"
