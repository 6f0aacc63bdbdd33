"""The command `loaderkit`: `run`, `check`, `explain`, `profile`, `tune`, `index`, `restore`, `manifest` and `demo`.

app.py        the commands' names, and what becomes of their errors: exit codes and one line on stderr
options.py    what several commands take
console.py    where the result and the messages go
running.py    `run`                 describing.py  `check`, `explain`
indexing.py   `index`               profiling.py   `profile`; trying.py, outputs.py: what it runs, and where its report goes
tuning.py     `tune`                trying.py      what those two share
restoring.py  `restore`, `manifest`

Nothing heavy is imported before a command needs it: `loaderkit --help` takes no torch.
"""

from loaderkit.cli.app import main

__all__ = ["main"]
