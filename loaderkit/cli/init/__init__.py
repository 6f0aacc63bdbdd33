"""`loaderkit init`: looks at data, and writes a pipeline for it."""
