"""A Slurm cluster of three nodes on this host: the real daemons of Debian's `slurm-wlm`, with folders of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import wait_until

NODES = ("n1", "n2", "n3")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
OverTimeLimit=0
ReturnToService=2
MpiDefault=none
KillWait=30
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_commands() -> list[str]:
    return [command for command in COMMANDS if shutil.which(command) is None]


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[None]:
    """Start the daemons, with $SLURM_CONF set to theirs; end them by their ids."""
    for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    first = _free_ports(4)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder, host=socket.gethostname(), control=first, first=first + 1, last=first + len(NODES)
        )
    )
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(configuration)
    files = [f"--{kind}-file={folder}/munge/{kind}" for kind in ("pid", "log", "seed")]
    try:
        _run("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge/socket", *files)
        _run("slurmctld")
        for node in NODES:
            _run("slurmd", "-N", node)
        wait_until(lambda: _run("sinfo", "-h", "-o", "%T").split() == ["idle"], "Slurm's nodes")
        yield
    finally:
        for file in (*folder.glob("n?.pid"), folder / "slurmctld.pid", folder / "munge" / "pid"):
            _end(file)
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def _end(file: Path) -> None:
    """End the daemon that wrote its id there."""
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid = int(file.read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10.0
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> int:
    """Return the first of some neighbouring ports of which none is taken."""
    for first in range(21_000 + os.getpid() % 5_000, 60_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")
