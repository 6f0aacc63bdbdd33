"""`restore()`, the DCP storage reader, and what both check before the first byte is written."""
