"""Where workers are on several nodes: what each of them did, and what the way from there to the trainer carried."""
