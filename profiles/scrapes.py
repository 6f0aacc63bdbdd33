"""What scrapes cost: CPU time of a loop that is scraped each second, against the same without, in turns; and of one scrape.

python -m profiles.scrapes [SECONDS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import loaderkit

PORT, NUM_ROUNDS, NUM_SCRAPES = 19431, 5, 500
SCRAPER = f"""
import sys, time, urllib.request
accept = {{"Accept": "application/openmetrics-text;version=1.0.0"}}
ask = urllib.request.Request("http://127.0.0.1:{PORT}/metrics", headers=accept)
for _ in range(int(sys.argv[1])):
    urllib.request.urlopen(ask).read()
    time.sleep(float(sys.argv[2]))
"""


def main() -> None:
    seconds = float(sys.argv[1]) if sys.argv[1:] else 10.0
    with tempfile.TemporaryDirectory() as folder:
        _write_pictures(Path(folder))
        source = {"kind": "files", "url": folder, "label": "parent"}
        stages = ["read", "decode", {"random_resized_crop": {"size": 224}}, {"batch": {"size": 64}}, "normalize"]
        pipeline = {"source": source, "stages": stages, "prefetch": {"concurrency": 2}, "metrics": {"prometheus": PORT}}
        with loaderkit.build(pipeline) as loader:
            for _ in loader:
                pass
            cpu: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(NUM_ROUNDS):
                for is_scraped in (False, True):
                    cpu[is_scraped].append(_cpu_of_a_batch(loader, seconds, is_scraped=is_scraped))
            ready_s = time.process_time()
            subprocess.run([sys.executable, "-c", SCRAPER, str(NUM_SCRAPES), "0"], check=True)
            a_scrape_s = (time.process_time() - ready_s) / NUM_SCRAPES
            began_s = time.perf_counter()
            for _ in range(NUM_SCRAPES):
                loader.stats()
            stats_s = (time.perf_counter() - began_s) / NUM_SCRAPES
    without, scraped = (statistics.median(cpu[is_scraped]) for is_scraped in (False, True))
    ratios = [one / other for one, other in zip(cpu[True], cpu[False], strict=True)]
    print(
        json.dumps(
            {
                "cpu_ms_a_batch": 1e3 * without,
                "cpu_ms_a_batch_scraped": 1e3 * scraped,
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "cpu_ms_a_scrape": 1e3 * a_scrape_s,
                "of_it_stats_ms": 1e3 * stats_s,
            },
            indent=1,
        )
    )


def _cpu_of_a_batch(loader: Any, seconds: float, *, is_scraped: bool) -> float:
    scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, "1000000", "1"]) if is_scraped else None
    try:
        end_s, num_batches, began_s = time.perf_counter() + seconds, 0, time.process_time()
        while time.perf_counter() < end_s:
            for _ in loader:
                num_batches += 1
        return (time.process_time() - began_s) / num_batches
    finally:
        if scraper is not None:
            scraper.kill()
            scraper.wait()


def _write_pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(512):
        path = folder / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8))
        small.resize((500, 400)).save(path, quality=90)


if __name__ == "__main__":
    main()
