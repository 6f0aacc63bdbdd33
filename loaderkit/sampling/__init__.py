"""Which sample comes when, on which rank: pure arithmetic and its saved state."""
