"""How a nursery of this process's own is started. It imports next to nothing: a trainer waits for it before all else.

A nursery (`processes.nursery`) dies with its starter, and all children die with the nursery: nothing survives, whatever
is killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.processes.service_processes import ServiceProcesses

ENVIRONMENT = {
    # Memory that is freed stays with the process: fresh pages cost more than they are worth to a worker.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_ARENA_MAX": "1",
    # No threads in the nursery (it forks), and one pool of threads in a runner, its own.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""Read by libraries when they are loaded, so it is the environment the nursery starts in."""


PRELOAD_VARIABLE = "PENSTOCK_PRELOAD"
"""Names modules, with commas between them, that a nursery imports before it forks runners: they share them."""


class StartedNursery(NamedTuple):
    process: subprocess.Popen[bytes]
    end: socket.socket
    """The starter's end of the link to the nursery: see `nursery_link`."""

    def abandon(self) -> None:
        """End one that was told nothing yet."""
        self.end.close()
        self.process.kill()
        self.process.wait()


WARM_VARIABLE = "PENSTOCK_WARM_KERNELS"
"""Names transforms whose kernels `penstock.kernels.warmed` compiles when a nursery imports it, before it forks."""


def start_nursery(*, preload: str = "", warm: str = "") -> StartedNursery:
    """Start a nursery of this process's own; return at once, while it still imports. What it is told waits for it.

    Its runners are forked when it has imported the module `preload` too, and what $PENSTOCK_PRELOAD names, and
    when the kernels of the feature transforms in `warm` are compiled, which are named with commas between them.

    It has a session of its own: Ctrl-C in a terminal or a notebook is for the starter, who decides what ends.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        process = subprocess.Popen(
            # -P: a file of the working directory named like a module of ours or of Python's must not be taken for it.
            [sys.executable, "-P", "-m", "penstock.processes.nursery", str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env=_environment(preload, warm),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return StartedNursery(process, ours)


def start_own_service(workers: int, *, preload: str = "", warm: str = "") -> ServiceProcesses:
    """Start a service of this process's own, as early as can be: it has as much to import as who will read from it."""
    nursery = start_nursery(preload=preload, warm=warm)
    try:
        from penstock.processes.service_processes import ServiceOptions, ServiceProcesses

        return ServiceProcesses(ServiceOptions(workers=workers), nursery)
    except BaseException:
        nursery.abandon()
        raise


def _environment(preload: str, warm: str) -> dict[str, str]:
    environment = {**os.environ, **ENVIRONMENT}
    if warm:
        environment[WARM_VARIABLE] = ",".join(filter(None, [environment.get(WARM_VARIABLE, ""), warm]))
        preload = ",".join(filter(None, [preload, "penstock.kernels.warmed"]))
    if preload:
        environment[PRELOAD_VARIABLE] = ",".join(filter(None, [environment.get(PRELOAD_VARIABLE, ""), preload]))
    root = Path(__file__).parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # run from a checkout: the nursery must find it too
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH", "")]))
    return environment
