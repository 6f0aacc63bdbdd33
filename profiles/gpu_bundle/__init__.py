"""What is carried to a machine with a GPU and without a network."""
