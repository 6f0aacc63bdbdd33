"""Several ranks: their connections, which of them reads which byte range, and how they exchange the bytes."""
