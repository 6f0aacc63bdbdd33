"""Write the photos in a peer's own format, with that peer's interpreter: python -m profiles.peers.convert PEER ROOT TARGET."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from profiles.peers.places import Places

if __name__ == "__main__":
    peer, root, target = sys.argv[1:]
    importlib.import_module(f"profiles.peers.contestants.{peer}").make(Places(Path(root)), Path(target))
