"""What the bytes of data files mean."""
