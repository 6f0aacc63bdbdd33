"""What makes the batches of a plan, threads, processes or actors: how they are started, tuned, replaced and ended."""
