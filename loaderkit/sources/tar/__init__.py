"""`kind: tar`: the samples of tar archives. A sample is the members that have a name in common."""
