"""Training from tar shards in a bucket: the requests to the store, the bytes from the cache, and the waits of the loop.

    python examples/train_from_s3.py s3://bucket/shards --cache /mnt/nvme/cache
    python examples/train_from_s3.py s3://bucket/shards --endpoint http://127.0.0.1:9000      # another store than AWS

Credentials come from the environment, ~/.aws or a role. The shards hold <key>.jpg and <key>.cls.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import loaderkit
from loaderkit import Pipeline
from loaderkit.errors import ExpiredCredentialsError, StageError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--endpoint")
    parser.add_argument("--cache", default=None)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    pipeline = (
        Pipeline.tar(
            args.url,
            fields={"image": "jpg", "label": "cls"},
            s3={"endpoint": args.endpoint},
            cache={"dir": args.cache, "size": "100GiB"},
        )
        .shuffle("block", seed=0, block="8MiB", window=8, lanes=8)
        .read()
        .decode()
        .random_resized_crop(64)
        .random_horizontal_flip()
        .batch(args.batch_size)
        .normalize()
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 8 * 8, 1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loaderkit.build(pipeline) as loader:
        before = loader.stats()
        for epoch in range(args.epochs):
            try:
                for batch in loader:
                    loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            except StageError as error:
                if isinstance(error.__cause__, ExpiredCredentialsError):
                    raise SystemExit(f"renew the credentials and go on with loader.state_dict(): {error}") from error
                raise
            after = loader.stats()
            stats = after.to_dict() if epoch == 0 else loader.stats(since=before).to_dict()
            before, store = after, stats["store"]
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, waited {stats['stall']['percent']:.0f} % of the time, "
                f"{store['num_requests']:.0f} requests, {store['fetched_bytes'] / 1e6:.2f} MB fetched, "
                f"{100 * store.get('cache_hit_rate', 0):.0f} % from the cache, {store['num_retries']:.0f} retries"
            )
    print("done")


if __name__ == "__main__":
    main()
