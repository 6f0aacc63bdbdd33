"""Make documents of tokens, in shards as corpora have them, for pipelines/gpt.yaml.

    python examples/make_tokens.py data/tokens
    TOKENS=$PWD/data/tokens loaderkit run pipelines/gpt.yaml --batches 20

`web` has Megatron's pairs of .bin and .idx, `code` .npy files in which token 0 ends a document.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 50_000  # so tokens are uint16


def documents(rng: np.random.Generator, num: int, mean: float) -> list[NDArray[np.uint16]]:
    """Documents of lognormal lengths, each with a last token of 0."""
    lengths = rng.lognormal(np.log(mean), 0.8, num).astype(int)
    return [np.append(rng.integers(1, VOCABULARY, length), 0).astype(np.uint16) for length in lengths]


def write_megatron(path: Path, made: list[NDArray[np.uint16]]) -> None:
    """`path`.bin with all tokens, and `path`.idx, which says where each document lies."""
    lengths = np.array([len(document) for document in made])
    starts = 2 * np.concatenate(([0], np.cumsum(lengths)[:-1]))
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(made), len(made) + 1)  # 8: uint16
    bounds = np.arange(len(made) + 1)
    index = [lengths.astype("<i4"), starts.astype("<i8"), bounds.astype("<i8")]
    path.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in index))
    np.concatenate(made).astype("<u2").tofile(path.with_suffix(".bin"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=4, help="of each source")
    parser.add_argument("--documents", type=int, default=200, help="of each shard")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    for name in ("web", "code"):
        (args.folder / name).mkdir(parents=True, exist_ok=True)
    for shard in range(args.shards):
        write_megatron(args.folder / "web" / f"shard-{shard:05}", documents(rng, args.documents, 600))
        np.save(args.folder / "code" / f"shard-{shard:05}.npy", np.concatenate(documents(rng, args.documents, 300)))
    print(f"{2 * args.shards} shards in {args.folder}")


if __name__ == "__main__":
    main()
