"""The README's path: a slow pipeline, its report, the patch applied, and the report after."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from loaderkit.cli import main
from loaderkit.profile.report import Report

README = (Path(__file__).parents[2] / "README.md").read_text()


def reports(folder: Path) -> list[Report]:
    return [Report.from_json(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_the_readme_leads_from_a_slow_pipeline_to_a_faster_one(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loaderkit.cli.profile._HEADROOM_S", 0.5)
    match = re.search(r"^```yaml\n(# slow\.yaml\n.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert match is not None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(photos)
    (tmp_path / "slow.yaml").write_text(match[1].replace("size: 64,", "size: 16,"))
    assert "loaderkit profile slow.yaml --steps 30 --step-time 100ms --out profiles" in README
    # A step that hides less than it needs; how much faster threads are depends on what else the machine does.
    command = ["profile", "slow.yaml", "--steps", "12", "--step-time", "5ms", "--no-verify"]

    assert main([*command, "--out", "before"]) == 0
    before = reports(tmp_path / "before")[0]
    shown = capsys.readouterr().out
    assert "\nprefetch: {executor: thread}\n" in shown[shown.index("To set:\n# not tried: --no-verify") :]
    assert [(one.key, one.before, one.value) for one in before.verdict.settings] == [
        ("prefetch.executor", "inline", "thread")
    ]

    (patch,) = (tmp_path / "before").glob("*.patch")
    subprocess.run(["patch", "slow.yaml", patch], cwd=tmp_path, check=True, capture_output=True)
    assert "# as it was for debugging" in (tmp_path / "slow.yaml").read_text()

    assert main([*command, "--out", "after"]) == 0
    after = reports(tmp_path / "after")[0]
    assert after.tuning["executor"] == "thread"
    assert all(one.key != "prefetch.executor" or one.value != "thread" for one in after.verdict.settings)
