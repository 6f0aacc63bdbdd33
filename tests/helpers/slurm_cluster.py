"""A real Slurm cluster for tests: slurmctld, and two nodes' slurmd on this machine, with files and keys below one folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path
from socket import gethostname

import pytest
from seaweed import free_port
from waiting import wait_for

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_PATIENCE_S = 60.0
# Become the program given, which the kernel kills when the thread that started it is gone (PR_SET_PDEATHSIG).
_DIE_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
# Nodes larger than this machine, each with a "GPU" that is a file. A requeued job may begin again once its credentials have
# expired, two minutes by default. A job in `high` preempts those in `low`, which then have 60 s.
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
FirstJobId={first_job}
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=64 RealMemory=1000 Gres=gpu:1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=1000 Gres=gpu:1
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10
"""


class Slurm:
    """A running cluster, whose commands `run` runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, *command: str | Path, folder: Path | None = None) -> str:
        """What a command of Slurm prints; an AssertionError if it fails."""
        environment = {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{_path()}"
        ran = subprocess.run(
            [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S
        )
        assert ran.returncode == 0, f"{command}: {ran.stderr}"
        return ran.stdout

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """The cluster, until the block ends: then its jobs are killed, and its daemons stopped. `folder` has a short name, as
    sockets lie in it."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        pytest.fail(
            f"{', '.join(missing)}: not installed; run `apt-get install slurm-wlm munge` as root", pytrace=False
        )
    (folder / "state").mkdir(parents=True)
    (folder / "gpu").touch()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    port, first_job = free_port(), free_port() % 1000 + 1
    text = _CONFIG.format(
        folder=folder,
        host=gethostname(),
        user=getuser(),
        port=port,
        ports=[free_port(), free_port()],
        first_job=first_job,
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"NodeName=n[0-1] Name=gpu File={folder}/gpu\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # which nothing here uses
    places = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    munge = [f"--{name}={folder / place}" for name, place in {**places, "log-file": "munge.log"}.items()]
    config = ("-D", "-f", str(folder / "slurm.conf"))
    daemons: list[subprocess.Popen[bytes]] = []

    def begin(name: str, *arguments: str) -> None:
        program = shutil.which(name, path=_path())
        assert program is not None
        with open(folder / f"{name}.out", "ab") as out:
            command = [sys.executable, "-c", _DIE_WITH_PARENT, program, *arguments]
            daemons.append(subprocess.Popen(command, cwd=folder, stdout=out, stderr=out))

    slurm = Slurm(folder)
    try:
        begin("munged", "--foreground", "--force", *munge)
        wait_for((folder / "munge.socket").exists, _PATIENCE_S)
        begin("slurmctld", *config)
        begin("slurmd", *config, "-N", "n0")
        begin("slurmd", *config, "-N", "n1")
        wait_for(lambda: _idle(slurm) == 2, _PATIENCE_S)
        try:
            yield slurm
        finally:
            slurm.run("scancel", "--user", getuser())
            wait_for(lambda: not slurm.run("squeue", "--noheader"), _PATIENCE_S)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(_PATIENCE_S)


def _idle(slurm: Slurm) -> int:
    try:
        return slurm.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t").split().count("idle")
    except AssertionError:  # slurmctld does not answer yet
        return 0


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
