"""Slurm: a place is a task of a job array.

The array's job has a name of the service's own, by which its tasks are found again after a provisioner's death. A task
that is to go is sent SIGTERM, which `penstock worker` takes as *leave in peace*; one that still waits in the queue is
cancelled. Slurm sends the same signal ahead of a job's time limit (`--signal`), so that a walltime reached is a drain.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection, Sequence

import msgspec

from penstock.provision.engines import EngineError, PlaceCommand

KIND = "slurm"
COMMAND_TIMEOUT_S = 30.0
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"})
ENDING = frozenset({"COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"})


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How places are asked of Slurm."""

    service: str
    """A name that tells this service's jobs from others' of the same user: it becomes the jobs' name."""
    cpus: int = 1
    """How many processors a place has (`--cpus-per-task`)."""
    time_limit_s: float | None = None
    """None: the partition's own."""
    output: str = "/dev/null"
    """Where a place writes its log, as sbatch takes it (`%A`, `%a` are its numbers)."""
    extra: tuple[str, ...] = ()
    """Further options for sbatch: a partition, an account, a constraint."""


class SlurmEngine(msgspec.Struct):
    """Runs places as tasks of Slurm's job arrays. See `engines.Engine`."""

    command: PlaceCommand
    options: SlurmOptions
    _released: set[str] = set()

    @property
    def kind(self) -> str:
        return KIND

    def start(self, count: int) -> None:
        if count:
            _run(self._sbatch(count), stdin=self._script())

    def names(self) -> frozenset[str]:
        tasks = self._tasks()
        self._released &= tasks.keys()
        return frozenset(name for name, state in tasks.items() if state not in ENDING and name not in self._released)

    def release(self, names: Collection[str]) -> None:
        tasks = self._tasks()
        for name in sorted(set(names) & tasks.keys()):
            # To the batch script alone, which is the worker itself: it drains, and the task ends with it.
            how = [] if tasks[name] in WAITING else ["--batch", "--signal=TERM"]
            try:
                _run(["scancel", *how, _task_of(name)])
            except EngineError:
                if name in self._tasks():  # else it has ended meanwhile
                    raise
            self._released.add(name)

    def close(self) -> None:
        self.release(self.names())

    def _sbatch(self, count: int) -> list[str]:
        words = ["sbatch", "--parsable", f"--job-name={self.options.service}", f"--array=0-{count - 1}"]
        words += [
            "--ntasks=1",
            f"--cpus-per-task={self.options.cpus}",
            f"--output={self.options.output}",
            "--no-requeue",
        ]
        if self.options.time_limit_s is not None:
            words.append(f"--time={_minutes(self.options.time_limit_s)}")
        # Slurm looks at time limits now and then, up to a minute late: the signal leaves that much more.
        words.append(f"--signal=B:TERM@{int(self.command.drain_s) + 60}")
        return [*words, *self.options.extra]

    def _script(self) -> str:
        words = [shlex.quote(word) for word in self.command.arguments("NAME")]
        words[words.index("NAME")] = f'"{KIND}-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"'
        # exec: the signals that Slurm sends to the batch script are the worker's.
        return f"#!/bin/sh\nexec {' '.join(words)}\n"

    def _tasks(self) -> dict[str, str]:
        """Return the state of each task that Slurm still knows, by its place's name."""
        listed = _run(["squeue", "--me", "-h", "-r", f"--name={self.options.service}", "-o", "%F %K %T"])
        rows = (line.split() for line in listed.splitlines())
        return {f"{KIND}-{job}-{task}": state for job, task, state in rows}


def _task_of(name: str) -> str:
    """Return a place's task as Slurm names it.

    >>> _task_of("slurm-12-3")
    '12_3'
    """
    job, _, task = name.removeprefix(f"{KIND}-").partition("-")
    return f"{job}_{task}"


def _minutes(seconds: float) -> str:
    """
    >>> _minutes(90)
    '1:30'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _run(words: Sequence[str], stdin: str = "") -> str:
    """Run one of Slurm's commands; return what it prints."""
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        raise EngineError(f"{words[0]!r} is not on this host: run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{words[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s: is slurmctld up?") from None
    if done.returncode:
        raise EngineError(f"{words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
