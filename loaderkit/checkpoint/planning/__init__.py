"""Which rank writes which bytes of a checkpoint: each byte once, and all ranks about as many. Arithmetic only."""
