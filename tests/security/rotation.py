"""All keys of a service are rotated while its processes are killed: nothing is lost, nothing comes twice.

    python -m tests.security.rotation [--kills 50] [--rotations 3] [--elements 40000] [--seed 1]

A dispatcher, two workers and a trainer that checkpoints run as the command line starts them, by TCP, with keys from
`penstock keys`. Whom to kill and when follows from the seed and the trainer's progress. In between, every key is
rotated the way an operator does it: new keys are made while the old ones are valid, every process is started again (by
SIGKILL) with the new one, and the old ones are revoked, and from then on are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.core.errors import AuthenticationError, NotPermittedError
from penstock.dispatcher.key_registry import KeyFile
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials
from penstock.wire.messages import ListJobs, ListWorkers, Workers

WORKERS = 2
BATCH, CHECKPOINT_EVERY = 20, 5
WORK_S = 0.001
STALL_S = 120.0
READY_S = 60.0
PARTIES = {"runner": 5, "worker": 2, "dispatcher": 2, "trainer": 2}  # weights
ROLES = ("trainer", "agent", "operator")
COMMAND = [sys.executable, "-P", "-m", "penstock"]


def work(number: int) -> int:
    time.sleep(WORK_S)
    return number


def train(address: str, folder: Path, elements: int) -> None:
    """Read one epoch, writing down what came; killed at any time, it goes on from its checkpoint."""
    checkpoint = folder / "checkpoint"
    dataset = ps.range(elements).map(work).batch(BATCH)
    loader = dataset.distribute(address, job="rotated", limits=ps.Limits(timeout_s=STALL_S))
    with (folder / "received").open("ab") as received, loader:
        kept = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"bytes": 0}
        received.truncate(kept["bytes"])
        if "loader" in kept:
            loader.load_state_dict(kept["loader"])
        for step, batch in enumerate(loader, 1):
            while os.fstat(received.fileno()).st_size // 8 >= int((folder / "until").read_text()):
                time.sleep(0.02)  # what is to happen on the way has not happened yet
            received.write(b"".join(int(number).to_bytes(8, "little") for number in batch))
            received.flush()
            if step % CHECKPOINT_EVERY == 0:
                content = {"loader": loader.state_dict(), "bytes": os.fstat(received.fileno()).st_size}
                checkpoint.with_suffix(".new").write_text(json.dumps(content))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)
    (folder / "finished").touch()


class Cluster:
    """The processes, each started again after it was killed."""

    def __init__(self, folder: Path, elements: int, seed: int) -> None:
        self.folder, self.keys = folder, folder / "keys"
        self._rng = random.Random(seed)
        self._penstock("keys", "make", str(self.keys))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.done: Counter[str] = Counter()
        address = folder / "service.json"
        given = ["--keys", str(self.keys / "server.json"), "--journal", str(folder / "journal")]
        given += ["--service-file", str(address)]
        self._commands: dict[str, list[str]] = {
            "dispatcher": [*COMMAND, "dispatcher", "--bind", "127.0.0.1", "--port", "0", *given]
        }
        self.start("dispatcher")
        self._wait("the dispatcher", address.exists)
        self.address = json.loads(address.read_text())["address"]
        port = self.address.rpartition(":")[2]
        self._commands["dispatcher"][self._commands["dispatcher"].index("--port") + 1] = port
        for number in range(WORKERS):
            to = ["--dispatcher", self.address, "--keys", str(self.keys / "agent.json")]
            self._commands[f"worker{number}"] = [*COMMAND, "worker", *to, "--processes", "1", "--threads", "1"]
        arguments = ["train", self.address, str(folder), str(elements)]
        self._commands["trainer"] = [sys.executable, "-m", "tests.security.rotation", *arguments]
        for name in self._commands:
            if name not in self._processes:
                self.start(name)

    def _penstock(self, *arguments: str) -> str:
        ran = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=True)
        return ran.stdout

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._commands[name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "PENSTOCK_KEYS": str(self.keys / "trainer.json")},
            )

    def restart(self, name: str) -> None:
        """Kill a process and start it again."""
        self._processes[name].kill()
        self._processes[name].wait()
        self.start(name)

    def strike(self) -> None:
        """Kill somebody."""
        party = self._rng.choices(list(PARTIES), list(PARTIES.values()))[0]
        if party == "runner":
            self._wait("a runner to kill", self._kill_runner)
        else:
            self.restart(party if party != "worker" else f"worker{self._rng.randrange(WORKERS)}")
        self.done[party] += 1

    def _kill_runner(self) -> bool:
        runners = [
            pid
            for name in self._commands
            if name.startswith("worker")
            for pid in _beneath(self._processes[name].pid)
            if "/" in _name_of(pid)
        ]
        with contextlib.suppress(ProcessLookupError):
            if runners:
                os.kill(self._rng.choice(runners), signal.SIGKILL)
                return True
        return False

    def rotate(self) -> None:
        """Give everybody a new key, and take the old ones back when all have it."""
        old = {role: Credentials.read(self.keys / f"{role}.json") for role in ROLES}
        for key in old.values():
            self._penstock("keys", "rotate", str(self.keys), key.name, "--role", key.role)
        for name in self._commands:
            self.restart(name)
            self.done["for its new key"] += 1
        operator = Credentials.read(self.keys / "operator.json")
        with ControlClient(self.address, operator, name="operator") as control:
            self._wait("the workers with their new keys", lambda: _workers(control) == WORKERS)
        for key in old.values():
            self._penstock("keys", "revoke", str(self.keys), key.name, "--role", key.role, f"--key={key.public}")
        self._wait("the end of the old keys", lambda: all(map(self._is_refused, old.values())))
        valid = [record for record in KeyFile.read(self.keys / "registry.json").keys if record.revoked is None]
        assert len(valid) == len(ROLES), valid

    def _is_refused(self, key: Credentials) -> bool:
        try:
            with ControlClient(self.address, key, name="old") as control:
                control.ask(ListJobs(), timeout_s=READY_S, what="whether an old key is refused")
        except (AuthenticationError, NotPermittedError):
            return True
        return False

    def _wait(self, what: str, condition: Any) -> None:
        deadline = time.monotonic() + READY_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {READY_S:.0f} s: {self.said()}")
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(f"{path.stem}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def progress(self) -> int:
        path = self.folder / "received"
        return path.stat().st_size // 8 if path.exists() else 0

    def finished(self) -> bool:
        if (self.folder / "finished").exists():
            return True
        if self._processes["trainer"].poll() is not None and not (self.folder / "finished").exists():
            raise RuntimeError(f"the trainer ended by itself: {self.said()}")
        return False

    def received(self) -> list[int]:
        content = (self.folder / "received").read_bytes()
        return [int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), 8)]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def _write(path: Path, number: int) -> None:
    path.with_suffix(".new").write_text(str(number))
    os.replace(path.with_suffix(".new"), path)


def _beneath(pid: int) -> list[int]:
    try:
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(each for child in children for each in _beneath(child))]


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _workers(control: ControlClient) -> int:
    answer = control.ask(ListWorkers(), timeout_s=READY_S, what="the workers")
    assert isinstance(answer, Workers)
    return len(answer.workers)


def rotate_under_kills(folder: Path, *, kills: int, rotations: int, elements: int, seed: int) -> dict[str, Any]:
    """Run an epoch; return who was killed, and what was lost or came twice."""
    began = time.monotonic()
    steps = ["kill"] * kills
    for number in range(rotations):
        steps.insert((number + 1) * len(steps) // (rotations + 1), "rotate")
    step = elements / len(steps)
    marks = [int((place + 0.5) * step) for place in range(len(steps))]
    best, moved = 0, time.monotonic()
    _write(folder / "until", int(step))  # it reads on while somebody is killed, and no further than to the next kill
    cluster = Cluster(folder, elements, seed)
    try:
        while not cluster.finished():
            progress = cluster.progress()
            if progress > best:
                best, moved = progress, time.monotonic()
            elif time.monotonic() - moved > STALL_S:
                raise TimeoutError(f"no new element for {STALL_S:.0f} s after {best}: {cluster.said()}")
            if marks and progress >= marks[0]:
                marks.pop(0)
                if steps.pop(0) == "kill":
                    cluster.strike()
                else:
                    cluster.rotate()
                _write(folder / "until", int(marks[0] + step / 2) if marks else elements)
            else:
                time.sleep(0.01)
        received = Counter(cluster.received())
    finally:
        cluster.close()
    return {
        "elements": elements,
        "killed": dict(cluster.done),
        "rotations": rotations,
        "left_to_do": len(steps),
        "lost": sum(number not in received for number in range(elements)),
        "twice": sum(count > 1 for count in received.values()),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--elements", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = rotate_under_kills(Path(folder), **vars(options))
    holds = not (found["lost"] or found["twice"] or found["left_to_do"])
    print(json.dumps({"experiment": "rotation", "holds": holds, **found}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
