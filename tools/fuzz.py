"""Random and mutated messages against everything that takes messages. Ends with 1 if something gives way.

    python tools/fuzz.py decoders [--seconds 60]       coverage-guided (atheris), or random where it is not installed
    python tools/fuzz.py dispatcher [--messages 100000]
    python tools/fuzz.py runner [--messages 100000]
    python tools/fuzz.py all                            all of them

Messages are made from the types themselves (`tests/security/hostile.py`), so that no type is left out, and half of them
are mutated afterwards. What counts as giving way: a process that ends, a request that makes the dispatcher's own code
fail, no answer to an honest request within a minute, a journal that cannot be read afterwards, an honest reader that
gets something wrong, or more memory than `MOST_GROWTH_MB`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import zmq  # noqa: E402
from tests.dispatcher import serving  # noqa: E402
from tests.keys import SERVER, new_key  # noqa: E402
from tests.security.decoders import TARGETS, try_decoding  # noqa: E402
from tests.security.hostile import Hostile, kinds_of, mutated  # noqa: E402
from tests.security.strangers import resident_mb  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.client import connection as client_connection  # noqa: E402
from penstock.dispatcher.main import DispatcherConfig  # noqa: E402
from penstock.wire.addresses import RunnerAddress  # noqa: E402
from penstock.wire.control import ControlClient  # noqa: E402
from penstock.wire.credentials import Credentials, KnownKey  # noqa: E402
from penstock.wire.frames import ToRunner  # noqa: E402
from penstock.wire.framing import cut_request, decode_tell  # noqa: E402
from penstock.wire.messages import PROTOCOL, Jobs, ListJobs, Refused, Request  # noqa: E402
from penstock.wire.principals import Role  # noqa: E402
from penstock.wire.sockets import dial  # noqa: E402

BATCH = 100
ANSWER_S = 60.0
MOST_GROWTH_MB = 512.0
LIFE_MESSAGES = 2_000
"""A dispatcher is started again after so many, on the journal that they left; the journal of three lives is dropped."""
ROLES: tuple[Role, ...] = ("trainer", "runner", "provisioner", "agent", "operator")
TRUSTED = ("agent", "operator")  # they may change everybody's jobs: by registering workers, by steering
KEYS = {role: new_key(role, f"hostile-{role}") for role in ROLES}
VICTIM, VICTIMS_JOB = new_key("trainer", "victim"), "victims"
KNOWN = tuple(KnownKey(key.public, key.principal) for key in (VICTIM, *KEYS.values()))
OUR_FAULT = "the dispatcher failed over this request"
RUNNERS_FAULT = "could not be dealt with"


class Finding(Exception):
    """Something gave way."""


def fuzz_decoders(options: argparse.Namespace) -> dict[str, Any]:
    if importlib.util.find_spec("atheris") is not None:
        return _guided(options.seconds)
    rng, tried, end = random.Random(options.seed), 0, time.monotonic() + options.seconds
    while time.monotonic() < end:
        for name, target in TARGETS.items():
            message = target.examples(rng)
            for data in (message, mutated(rng, message), mutated(rng, message)):
                _try(name, data)
                tried += 1
    return {"how": "random", "tried": tried}


def _try(name: str, data: bytes) -> None:
    try:
        try_decoding(name, data)
    except BaseException as error:
        raise Finding(f"{name}: {type(error).__name__} ({error}) of {data!r}") from error


def _guided(seconds: float) -> dict[str, Any]:
    """Run libFuzzer in a process of its own: it ends the process it runs in."""
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(0)
        for number, target in enumerate(TARGETS.values()):
            for example in range(30):
                (Path(folder) / f"{number}-{example}").write_bytes(bytes((number,)) + target.examples(rng))
        limits = [f"-max_total_time={int(seconds)}", "-max_len=20000", "-rss_limit_mb=2048", "-timeout=10"]
        artifacts = tempfile.mkdtemp(prefix="penstock-fuzz-")
        command = [sys.executable, __file__, "guided", folder, *limits, f"-artifact_prefix={artifacts}/"]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        lines = ran.stderr.splitlines()
        if ran.returncode:
            raise Finding("\n".join(lines[-40:]) + f"\nwhat did it lies in {artifacts}")
        shutil.rmtree(artifacts)
        done = next((line for line in reversed(lines) if line.startswith("Done ")), "")
        covered = next((line for line in reversed(lines) if "cov:" in line), "")
        return {"how": "coverage-guided", "said": done, "covered": covered.strip()}


def _be_guided(arguments: list[str]) -> None:
    import atheris  # type: ignore[import-not-found, unused-ignore]

    with atheris.instrument_imports(include=["penstock.wire", "penstock.dispatcher.asks"]):
        for module in [name for name in sys.modules if name.startswith(("penstock", "tests."))]:
            del sys.modules[module]
        from tests.security.decoders import TARGETS, try_decoding

    names = list(TARGETS)

    def one_input(data: bytes) -> None:
        if data:
            try_decoding(names[data[0] % len(names)], data[1:])

    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


class Sender:
    """A friend with a key: authenticated, and hostile."""

    def __init__(self, address: str, credentials: Any, *, data: bool) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = dial(self._context, credentials, address, data=data)
        if not self._socket.poll(int(ANSWER_S * 1000), zmq.POLLOUT):
            raise Finding(f"no connection to {address} within {ANSWER_S:.0f} s")

    def send(self, message: bytes) -> None:
        for frame in cut_request(message):
            self._socket.send(frame, zmq.NOBLOCK)

    def received(self, wait_s: float) -> Iterator[bytes]:
        while self._socket.poll(int(wait_s * 1000)):
            yield self._socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=0)


def fuzz_dispatcher(options: argparse.Namespace) -> dict[str, Any]:
    rng, sent, told, grown_mb = random.Random(options.seed), 0, Counter[str](), 0.0
    slowest_s: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        life = 0
        while sent < options.messages:
            journal = Path(folder) / f"journal{life // 3}"
            if life % 3 == 0 and life:
                shutil.rmtree(Path(folder) / f"journal{life // 3 - 1}")
            role = ROLES[life % len(ROLES)]
            config = DispatcherConfig(server=SERVER, known=KNOWN, journal=str(journal))
            try:
                process, address = serving.started(config)
            except RuntimeError as error:
                raise Finding(f"the journal of life {life} cannot be read: {error}") from error
            try:
                count = min(LIFE_MESSAGES, options.messages - sent)
                more_mb, took_s = _one_life(rng, role, process, address, count, told)
                grown_mb, slowest_s[role] = max(grown_mb, more_mb), max(slowest_s.get(role, 0.0), took_s)
                sent += count
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                said = serving.ended(process)
            if process.returncode:
                raise Finding(f"the dispatcher ended with {process.returncode}: {said[-3000:]}")
            life += 1
    return {
        "messages": sent,
        "lives": life,
        "told": dict(told.most_common()),
        "grown_mb": round(grown_mb, 1),
        "slowest answer to a batch, by role": {role: f"{took_s:.1f} s" for role, took_s in slowest_s.items()},
    }


def _one_life(
    rng: random.Random, role: Role, process: Any, address: str, count: int, told: Counter[str]
) -> tuple[float, float]:
    before_mb, most_mb, slowest_s = resident_mb(process.pid), 0.0, 0.0
    with ControlClient(address, VICTIM, name="victim") as control:
        serving.put_blobs(control)
        serving.open_job(control, serving.opening(job=VICTIMS_JOB, client="honest"))
        victims = _shown_to_victim(control)
    sender = Sender(address, KEYS[role], data=False)
    names = ["resnet", "a1", "a1.0", "c1", "agent0", "worker0", "h", serving.spec().graph, VICTIMS_JOB, "honest"]
    hostile = Hostile(rng, names, (serving.spec(), serving.opening()))
    kinds = list(kinds_of(Request).values())
    honest = msgspec.msgpack.encode(ListJobs())
    number = 0
    try:
        for _ in range(0, count, BATCH):
            batch = {}
            for _ in range(BATCH):
                number += 1
                body = batch[number] = hostile.message(rng.choice(kinds))
                message = msgspec.msgpack.encode([PROTOCOL, number, 0, msgspec.Raw(body)])
                sender.send(mutated(rng, message) if rng.random() < 0.5 else message)
            number += 1
            sender.send(msgspec.msgpack.encode([PROTOCOL, number, 0, msgspec.Raw(honest)]))
            began = time.monotonic()
            _take_answers(sender, number, batch, told)
            slowest_s = max(slowest_s, time.monotonic() - began)
            most_mb = max(most_mb, resident_mb(process.pid) - before_mb)
            if most_mb > MOST_GROWTH_MB:
                raise Finding(f"the dispatcher grew by {most_mb:.0f} MB within {number} messages")
    finally:
        sender.close()
    if role not in TRUSTED:
        with ControlClient(address, VICTIM, name="victim") as control:
            if (now := _shown_to_victim(control)) != victims:
                raise Finding(f"a {role} changed another principal's job: {victims} became {now}")
    return most_mb, slowest_s


def _shown_to_victim(control: ControlClient) -> list[object]:
    """Return what stays the same of a job that nobody else may change."""
    answer = control.ask(ListJobs(), timeout_s=ANSWER_S, what="the victim's jobs")
    assert isinstance(answer, Jobs)
    return [
        (line.owner, line.epoch, line.ranks, line.splits_left, "cancelled" in line.status, "paused" in line.status)
        for line in answer.jobs
        if line.job == VICTIMS_JOB
    ]


def _take_answers(sender: Sender, until: int, batch: dict[int, bytes], told: Counter[str]) -> None:
    for frame in sender.received(ANSWER_S):
        tell = decode_tell(frame)
        told[type(tell.body).__name__] += 1
        if isinstance(tell.body, Refused) and OUR_FAULT in tell.body.reason:
            body = batch.get(tell.number)
            raise Finding(f"{tell.body.reason}: {msgspec.msgpack.decode(body) if body else 'no batch'}")
        if tell.number == until:
            return
    raise Finding(f"an honest request had no answer within {ANSWER_S:.0f} s after {list(batch.values())[-3:]}")


@contextmanager
def _overheard() -> Iterator[list[tuple[RunnerAddress, Credentials, Any]]]:
    """Note what an honest reader sends to its runner, where that is, and the key it shows there."""
    heard: list[tuple[RunnerAddress, Credentials, Any]] = []
    made, send = client_connection.RunnerConnection.__init__, client_connection.RunnerConnection.send
    where: dict[int, tuple[RunnerAddress, Credentials]] = {}

    def making(self: Any, link: Any, runner: Any, address: str, **given: Any) -> None:
        parsed = RunnerAddress.parse(address)
        where[id(self)] = (parsed, link.reading_key.toward(parsed.key))
        made(self, link, runner, address, **given)

    def sending(self: Any, message: Any) -> None:
        heard.append((*where[id(self)], message))
        send(self, message)

    client_connection.RunnerConnection.__init__ = making  # type: ignore[method-assign]
    client_connection.RunnerConnection.send = sending  # type: ignore[method-assign]
    try:
        yield heard
    finally:
        client_connection.RunnerConnection.__init__ = made  # type: ignore[method-assign]
        client_connection.RunnerConnection.send = send  # type: ignore[method-assign]


def _take_outputs(sender: Sender) -> int:
    """Return how many messages came back; what a runner logs goes to all who read there."""
    count = 0
    for frame in sender.received(0.001):
        count += 1
        if RUNNERS_FAULT.encode() in frame:
            raise Finding(frame.decode(errors="replace"))
    return count


def fuzz_runner(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    with ps.LocalService(workers=1) as service, _overheard() as heard:
        dataset = ps.range(1 << 40).map(abs).batch(16)
        with dataset.distribute(service, job="fuzzed", limits=ps.Limits(timeout_s=60)) as loader:
            epoch = iter(loader)
            next(epoch)
            (pid,) = service.worker_pids().values()
            address, key, _ = heard[0]
            honest = {type(message): message for *_, message in heard}
            opened = next(message for *_, message in heard if hasattr(message, "attempt"))
            names = [opened.stream, opened.attempt, opened.runner, "nobody", f"{opened.attempt}.7"]
            hostile = Hostile(rng, names, list(honest.values()))
            kinds = list(kinds_of(ToRunner).values())
            before_mb, most_mb, sent, answers, cut_off = resident_mb(pid), 0.0, 0, 0, 0
            sender = Sender(address.socket, key, data=True)
            try:
                while sent < options.messages:
                    try:
                        for _ in range(BATCH):
                            message = hostile.message(rng.choice(kinds))
                            sender.send(mutated(rng, message) if rng.random() < 0.5 else message)
                            sent += 1
                    except zmq.Again:  # who sends faster than is heard is cut off, and may come again
                        cut_off += 1
                        sender.close()
                        sender = Sender(address.socket, key, data=True)
                    answers += _take_outputs(sender)
                    most_mb = max(most_mb, resident_mb(pid) - before_mb)
                    if most_mb > MOST_GROWTH_MB:
                        raise Finding(f"the runner grew by {most_mb:.0f} MB within {sent} messages")
                    if sent % 10_000 == 0:
                        sender.close()  # as many openings as there are connections are kept for readers
                        sender = Sender(address.socket, key, data=True)
            finally:
                sender.close()
        if list(service.worker_pids().values()) != [pid]:
            raise Finding(f"the runner ended within {sent} messages")
        with (
            ps.range(5_000).map(abs).batch(16).distribute(service, job="after", limits=ps.Limits(timeout_s=60)) as after
        ):
            read = [int(value) for batch in after for value in batch]
        if sorted(read) != list(range(5_000)):
            raise Finding(f"a reader got {len(read)} of 5,000 elements after {sent} messages")
    return {"messages": sent, "answers": answers, "cut_off": cut_off, "grown_mb": round(most_mb, 1)}


PARTS = {"decoders": fuzz_decoders, "dispatcher": fuzz_dispatcher, "runner": fuzz_runner}


def main() -> int:
    if sys.argv[1:2] == ["guided"]:
        _be_guided(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all"], nargs="?", default="all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the decoders")
    parser.add_argument("--messages", type=int, default=20_000, help="each for the dispatcher and the runner")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(ROOT / "src"))
    status = 0
    for name, part in PARTS.items():
        if options.part not in (name, "all"):
            continue
        began = time.monotonic()
        try:
            found = part(options)
        except Finding as finding:
            print(f"{name}: FOUND after {time.monotonic() - began:.0f} s: {finding}", flush=True)
            status = 1
        else:
            figures = ", ".join(f"{key} {value}" for key, value in found.items())
            print(f"{name}: nothing found in {time.monotonic() - began:.0f} s: {figures}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
