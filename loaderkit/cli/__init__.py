"""The command line: one module a command, beside what several share (`terminal`, `experiments`, `outputs`).

`check` also holds `explain`, and `restore` also holds `manifest`: each pair describes the same thing. Nothing heavy is imported
before a command needs it: `loaderkit --help` imports no torch.
"""

from loaderkit.cli.app import main

__all__ = ["main"]
