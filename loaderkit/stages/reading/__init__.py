"""How `read` reads what is not bytes in memory of a chunk: arrays and records straight into slots, rows of tables."""
