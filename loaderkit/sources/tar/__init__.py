"""`kind: tar`: the samples of tar archives, members that have a name in common."""
