"""What joins loaderkit to other frameworks: one module a framework, which is imported only where it is used."""
