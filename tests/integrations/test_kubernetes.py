"""The manifests of the page on Kubernetes are valid, and what its pods run goes on after one of them was evicted."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_examples import examples, named
from page_jobs import PATIENCE_S, check_log, undisturbed, write_job
from seaweed import free_port
from waiting import wait_for

from loaderkit._internal.config.yaml_text import from_yaml

PAGE = "docs/jobs/kubernetes.md"
MANIFESTS = [text for kind, text in examples(PAGE) if kind == "yaml" and "apiVersion:" in text]


@pytest.mark.integration
@pytest.mark.parametrize("text", MANIFESTS, ids=lambda text: text.split()[1])
def test_a_manifest_is_valid(text: str) -> None:
    kubernetes: Any = importlib.import_module("kubernetes_validate")
    manifest: Any = from_yaml(text)
    kubernetes.validate(manifest, kubernetes.latest_version(), strict=True)
    with pytest.raises(kubernetes.ValidationError, match="sepc"):
        kubernetes.validate({**manifest, "sepc": {}}, kubernetes.latest_version(), strict=True)


def test_the_pods_find_one_another_by_the_service() -> None:
    service: Any = from_yaml(named(PAGE, "service.yaml"))
    job: Any = from_yaml(named(PAGE, "pods.yaml"))
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}, "the label that the controller of Jobs gives its pods"
    assert service["metadata"]["name"] == pod["subdomain"]
    command = pod["containers"][0]["command"]
    assert f"--master-addr={name}-0.{pod['subdomain']}" in command
    assert f"--nnodes={job['spec']['completions']}" in command
    assert job["spec"]["completions"] == job["spec"]["parallelism"], "all of them train at once"


@pytest.mark.prove
def test_all_pods_go_on_after_one_was_evicted(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod's command, as a kubelet starts it, on this machine and with one rank."""
    write_job(tmp_path, photos, monkeypatch)
    job: Any = from_yaml(named(PAGE, "pods.yaml"))
    command = " ".join(job["spec"]["template"]["spec"]["containers"][0]["command"])
    here = {"torchrun": "-m torch.distributed.run", "train-0.train": "127.0.0.1", "per-node=8": "per-node=1"}
    for written, meant in here.items():
        assert written in command
        command = command.replace(written, meant)

    def begin(port: int) -> list[subprocess.Popen[bytes]]:
        started = []
        for index in range(job["spec"]["completions"]):
            words = command.replace("$(JOB_COMPLETION_INDEX)", str(index)).replace("29500", str(port)).split()
            with open(tmp_path / f"log-{index}.txt", "ab") as log:
                started.append(subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=log, stderr=log))
        return started

    log = tmp_path / "log-0.txt"
    pods = begin(free_port())
    try:
        wait_for(lambda: "step 20:" in log.read_text(), PATIENCE_S)
        pods[1].send_signal(signal.SIGTERM)
        assert [pod.wait(PATIENCE_S) for pod in pods] == [1, 1], "all are begun again"
        (tmp_path / "slow").unlink()
        pods = begin(free_port())
        assert [pod.wait(PATIENCE_S) for pod in pods] == [0, 0], log.read_text()
    finally:
        for pod in pods:
            pod.terminate()
            pod.wait(PATIENCE_S)
    check_log(log.read_text(), 1, undisturbed(tmp_path))
    assert "SignalException" in (tmp_path / "log-1.txt").read_text()
    assert "ChildFailedError" in log.read_text()
