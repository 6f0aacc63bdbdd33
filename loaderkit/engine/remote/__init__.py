"""The engine in several other processes, wherever they run: batches are dealt out by arithmetic, the dead are replaced."""
