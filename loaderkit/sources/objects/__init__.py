"""`kind: dataset` and `kind: iterable`: Python objects of the user's, and what can be told of whether they can be relied on."""
