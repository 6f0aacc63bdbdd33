"""The version of this package, for code that may not import the package's face."""

__version__ = "0.1.0"
