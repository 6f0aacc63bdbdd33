"""The terminal side of commands: their arguments and options, output and progress."""
