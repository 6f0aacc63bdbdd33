"""A program that begins to save a checkpoint, says "ready" with the file written and not committed, and waits for its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from crashing import Clock, Mortal, save_to

from loaderkit.connectors.file import FileConnector


class Waiting(Clock):
    def run(self, name: str, operation: Callable[[], Any]) -> Any:
        if name == "commit":
            print("ready", flush=True)
            sys.stdin.read()
        return super().run(name, operation)


if __name__ == "__main__":
    folder, number = sys.argv[1:]
    save_to(Mortal(FileConnector(folder), Waiting()), f"step-{number}", int(number))
