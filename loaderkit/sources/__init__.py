"""Sources list the samples, locate their bytes and read them: one module or package a kind, with its arguments and its kind."""
