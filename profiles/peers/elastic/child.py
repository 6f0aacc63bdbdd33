"""One peer through the matrix, in its own environment: lines of JSON, a cell each.

python -m profiles.peers.elastic.child MODULE FOLDER PAIRS SCENARIOS          PAIRS: 1-2,4-1
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

from profiles.peers.elastic.matrix import cells


def main() -> None:
    module, folder, pairs, scenarios = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")  # what the peer prints is no answer
    os.dup2(2, 1)
    peer: Any = importlib.import_module(f"profiles.peers.elastic.{module}")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    peer.make(place)
    print(json.dumps({"version": importlib.metadata.version(peer.PACKAGE)}), file=answers, flush=True)
    sizes = [(int(before), int(after)) for before, _, after in (pair.partition("-") for pair in pairs.split(","))]
    for cell in cells(peer.runner(place), scenarios.split(","), sizes, is_pairwise=peer.IS_PAIRWISE):
        print(json.dumps(cell), file=answers, flush=True)


if __name__ == "__main__":
    main()
