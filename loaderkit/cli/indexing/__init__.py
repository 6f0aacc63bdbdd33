"""`loaderkit index`: indexes beside data files, and the lengths of samples."""
