"""`kind: dataset` and `kind: iterable`: Python objects of the user's, and checks of whether they can be relied on."""
