"""`python -m loaderkit` is the command `loaderkit`."""

from loaderkit.cli import main

if __name__ == "__main__":
    main()
