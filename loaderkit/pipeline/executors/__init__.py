"""Who makes the batches of a plan: threads, processes or actors; how they are made, tuned, replaced and ended."""
