"""The version of this package, for code that may not import `loaderkit` itself."""

__version__ = "0.1.0"
