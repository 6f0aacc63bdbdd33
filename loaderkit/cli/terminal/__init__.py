"""How commands are asked and answer: their arguments and options, output, progress."""
