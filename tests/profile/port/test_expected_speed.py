"""What `watch --compare` expects of a pipeline is what the script then gets with it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from port_kinds import KINDS, drawn_script

from loaderkit.profile.report import Report

ROOT = Path(__file__).parents[3]
_WITHIN = 0.2


@pytest.mark.prove
@pytest.mark.alone
@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_ten_kinds_of_scripts_get_the_speed_that_was_expected(
    kind: str, tmp_path: Path, photos: Path, rng: random.Random
) -> None:
    drawn = drawn_script(kind, str(photos), rng)
    for name, text in (("train", drawn.script), ("ported", drawn.with_pipeline), ("drawn_data", drawn.module)):
        (tmp_path / f"{name}.py").write_text(text)

    def run(*arguments: str) -> str:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "helpers", tmp_path)))
        program = [sys.executable, "-W", "ignore", *arguments]
        done = subprocess.run(
            program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "loaderkit", "watch", "--compare", "--json", "r.json", "train.py")
    ported = Report.from_json((tmp_path / "r.json").read_text()).ported
    assert ported is not None
    assert ported.after is not None, (ported.unported, ported.why_not_run)
    found = float(run("ported.py").split()[-1])
    error = ported.after.samples_per_s / found - 1
    print(f"{kind}, step {drawn.step}: expected {ported.after.samples_per_s:.0f}, found {found:.0f} ({error:+.0%})")
    assert abs(error) <= _WITHIN
