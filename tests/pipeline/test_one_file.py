"""A training script of one file runs as it is, under every executor, torchrun and in a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import HELPERS, ROOT

SCRIPT = HELPERS / "one_file_training.py"
SAID = f"the same {float(sum(2 * n + 3 for n in range(64)))} 8"


def run(*command: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.forked_workers
def test_every_executor_of_this_machine() -> None:
    assert run(SCRIPT, "inline", "thread", "process", "auto").strip() == SAID


@pytest.mark.prove
def test_torchrun() -> None:
    """Each rank has a half of the batches."""
    said = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, "inline", "process", "auto"
    )
    totals = [line.split()[2:] for line in said.splitlines() if line.startswith("the same")]
    assert [batches for _, batches in totals] == ["4", "4"]
    assert sum(float(total) for total, _ in totals) == float(SAID.split()[2])


@pytest.mark.integration
def test_ray() -> None:
    code = f"import sys, ray, runpy; ray.init(num_cpus=2, include_dashboard=False); sys.argv[1:] = ['inline', 'ray']; \
runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    assert SAID in run("-c", code)


@pytest.mark.integration
def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    definitions, _, _ = SCRIPT.read_text().partition('if __name__ == "__main__":')
    cells = [
        definitions.replace("from __future__ import annotations\n", ""),
        "found = [totals(executor) for executor in ('inline', 'process', 'auto')]",
        "assert found[0] == found[1] == found[2], found\nprint('the same', *found[0][::2])",
    ]
    make: Any = nbformat.v4  # it has hints for some
    notebook = make.new_notebook(cells=[make.new_code_cell(cell) for cell in cells])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    assert notebook.cells[-1].outputs[0].text.strip() == SAID
