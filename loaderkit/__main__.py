"""`python -m loaderkit` is the command `loaderkit`."""

import sys

from loaderkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
