"""Shows a watched DataLoader as a pipeline in its report. It is ported when it is first iterated over, and checked and
run when the script is over.

port ── the script runs ──> report: check samples ──> write the pipeline ──> run it with the script's step
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaderkit.engine.metrics.stalls import START
from loaderkit.errors import LoaderkitError
from loaderkit.profile.port.check import Build, check_samples
from loaderkit.profile.port.loader import PortedPipeline, port_loader
from loaderkit.profile.port.measure import run_with_step, step_of
from loaderkit.profile.port.parts import PortedLoader, Unported
from loaderkit.profile.port.recognise import describe, where
from loaderkit.profile.port.write import tensors_beside, write_pipeline
from loaderkit.profile.report import Report
from loaderkit.profile.watched.script import ScriptLoop


@dataclass(frozen=True)
class ScriptComparison:
    """Ports the DataLoaders of `script` (a file or a module) to `path`, `path`-2, ...; `build` is `loaderkit.build`."""

    script: str
    path: Path
    force: bool
    build: Build

    def port(self, loader: Any) -> PortedPipeline:
        """The pipeline of a DataLoader, made without touching its samples."""
        try:
            return port_loader(loader, self.script.removesuffix(".py"))
        except Exception as error:  # the script is to run on
            why = f"it is no DataLoader that loaderkit knows ({type(error).__name__}: {error})"
            found = Unported(part="DataLoader", what=describe(loader), where=where(loader), why=why)
            return PortedPipeline(None, unported=(found,))

    def report(self, loop: ScriptLoop, number: int, ended: str | None) -> Report:
        """The loop's report with its pipeline, `number` of the script's; `ended`: why nothing more is to be run."""
        try:
            found = self._compared(loop, number, ended)
        except KeyboardInterrupt:
            found = PortedLoader(path=None, why_not_run="interrupted")
        except Exception as error:
            found = PortedLoader(path=None, why_not_run=f"it failed ({type(error).__name__}: {error})")
        return loop.report.model_copy(update={"ported": found})

    def _compared(self, loop: ScriptLoop, number: int, ended: str | None) -> PortedLoader:
        ported: PortedPipeline = loop.noted
        found = PortedLoader(
            path=None,
            pipeline=ported.pipeline,
            unported=[*ported.unported],
            notes=[*ported.notes],
            **_before(loop.report),
            why_not_run="something has no counterpart" if ported.pipeline is None else ended or "",
        )
        if found.why_not_run:
            return found
        ported, checked = check_samples(ported, self.build)
        found = found.model_copy(
            update={
                "pipeline": ported.pipeline,
                "unported": [*ported.unported],
                "notes": [*ported.notes],
                "checked": checked,
            }
        )
        if ported.pipeline is None:
            return found.model_copy(update={"why_not_run": "its samples are not the same"})
        found = found.model_copy(update=self._written(ported, number, loop.report.rank))
        assert loop.step_cpu is not None
        step = step_of(loop.report, loop.step_cpu.cpu_s, loop.step_cpu.delayed_share)
        if step is not None:
            found = found.model_copy(update={"step_s": step.seconds, "step_cpus": step.cpus})
        try:
            rate, stall_percent = run_with_step(ported, step, self.build)
        except LoaderkitError as error:
            return found.model_copy(update={"why_not_run": str(error)})
        return found.model_copy(update={"after": rate, "after_stall_percent": stall_percent})

    def _written(self, ported: PortedPipeline, number: int, rank: int) -> dict[str, Any]:
        """Write it, from rank 0; where, or why not."""
        path = self.path if number == 1 else self.path.with_stem(f"{self.path.stem}-{number}")
        if rank:
            return {}
        taken = [one for one in (path, tensors_beside(path)) if one.exists()]
        if taken and not self.force:
            return {"notes": [*ported.notes, f"not written, as {taken[0]} is there: --force, or another --pipeline"]}
        write_pipeline(ported, path, f"loaderkit watch --compare {self.script}")
        return {"path": str(path)}


def _before(report: Report) -> dict[str, float]:
    """The script's own speed, without its start, and how much of the time it waits; from a single batch nothing is known."""
    if report.num_batches < 2:
        return {}
    start_s = report.stall.by_stage.get(START, 0.0)
    num_samples = report.num_samples * (1 - 1 / max(1, report.num_batches)) if start_s else report.num_samples
    wall_s = report.wall_s - start_s
    stall_percent = 100 * (report.stall.total_s - start_s) / max(wall_s, 1e-9)
    return {"before": num_samples / max(wall_s, 1e-9), "before_stall_percent": max(0.0, stall_percent)}
