"""Joins loaderkit to other frameworks: one module for each framework, imported only where it is used."""
