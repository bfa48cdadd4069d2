"""Random and mutated messages against everything that takes messages. Ends with 1 if something gives way.

    python tools/fuzz.py decoders [--seconds 60]       coverage-guided (atheris), or random where it is not installed
        [--corpus FOLDER]                               goes on from what earlier runs have found, and keeps it there
    python tools/fuzz.py dispatcher [--messages 100000]
    python tools/fuzz.py runner [--messages 100000]
    python tools/fuzz.py all                            all of them

Messages are made from the types themselves (`tests/security/hostile.py`), so that no type is left out, and half of them
are mutated afterwards. What counts as giving way: a process that ends, a request that makes the dispatcher's own code
fail, no answer to an honest request within ten minutes, a journal that cannot be read afterwards, an honest reader that
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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import zmq  # noqa: E402
from tests.dispatcher import serving  # noqa: E402
from tests.keys import SERVER, new_key  # noqa: E402
from tests.security.decoders import TARGETS, try_decoding  # noqa: E402
from tests.security.hostile import NUMBERS, Hostile, Pool, kinds_of, mutated  # noqa: E402
from tests.security.strangers import resident_mb  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.client import connection as client_connection  # noqa: E402
from penstock.control.runners import START_TIMEOUT_S  # noqa: E402
from penstock.core.ids import StreamId  # noqa: E402
from penstock.dispatcher.allowances import Allowance  # noqa: E402
from penstock.dispatcher.main import DispatcherConfig  # noqa: E402
from penstock.wire.addresses import Listening, RunnerAddress  # noqa: E402
from penstock.wire.control import ControlClient  # noqa: E402
from penstock.wire.credentials import Credentials, KnownKey  # noqa: E402
from penstock.wire.fetching import FromFellow, ReadSplit  # noqa: E402
from penstock.wire.frames import CloseStream, ToRunner  # noqa: E402
from penstock.wire.framing import cut_request, decode_tell  # noqa: E402
from penstock.wire.messages import PROTOCOL, AgentBeat, AgentLeaving, Jobs, ListJobs, Refused, Request  # noqa: E402
from penstock.wire.principals import Role  # noqa: E402
from penstock.wire.sockets import dial  # noqa: E402

BATCH = 500
RENEWED = 20  # messages of the pool that are made anew for each batch
SAY_EVERY_S = 30.0
ANSWER_S = 600.0  # to an honest request; much, because what runs for an hour lets all others go first (nice)
MOST_GROWTH_MB = 512.0
LIFE_MESSAGES = 20_000
"""A dispatcher is started again after so many, on the journal that they left; the journal of three lives is dropped."""
RUNNER_LIFE_MESSAGES = 1_000_000
RUNNER_LIFE_S = START_TIMEOUT_S / 2
"""The process whose key one in `FELLOWS_TURN` connections shows never comes, and is waited for no longer than that."""
CONNECTION_MESSAGES = 10_000
FELLOWS_TURN = 5
"""One in so many connections to a runner is that of another process of its job, which may ask for what is kept."""
FAREWELL = "farewell-"
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
        with tempfile.TemporaryDirectory() as folder:
            return _guided(options.seconds, options.seed, Path(options.corpus or folder))
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


def _guided(seconds: float, seed: int, corpus: Path) -> dict[str, Any]:
    """Run libFuzzer in a process of its own: it ends the process it runs in."""
    corpus.mkdir(exist_ok=True)
    rng = random.Random(seed)
    for number, target in enumerate(TARGETS.values()):
        for example in range(30):
            (corpus / f"{number}-{example}").write_bytes(bytes((number,)) + target.examples(rng))
    artifacts = tempfile.mkdtemp(prefix="penstock-fuzz-")
    limits = [f"-max_total_time={int(seconds)}", "-max_len=20000", "-rss_limit_mb=2048", "-timeout=10"]
    command = [sys.executable, __file__, "guided", str(corpus), *limits, f"-artifact_prefix={artifacts}/"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = ran.stderr.splitlines()
    if ran.returncode:
        raise Finding("\n".join(lines[-40:]) + f"\nwhat did it lies in {artifacts}")
    shutil.rmtree(artifacts)
    done = next((line for line in reversed(lines) if line.startswith("Done ")), "")
    covered = next((line for line in reversed(lines) if "cov:" in line), "")
    return {"how": "coverage-guided", "said": done, "covered": covered.strip()}


def _be_guided(arguments: list[str]) -> None:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

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

    def received(self, wait_s: float, is_alive: Callable[[], bool]) -> Iterator[bytes]:
        """Give what comes; end when nothing has come for so long, or who should send it is gone."""
        silent_since = time.monotonic()
        while time.monotonic() - silent_since < wait_s:
            if self._socket.poll(500):
                yield self._socket.recv()
                silent_since = time.monotonic()
            elif not is_alive():
                return

    def close(self) -> None:
        self._context.destroy(linger=0)


class Progress:
    """Says now and then how far a part is: it may run for an hour."""

    def __init__(self, part: str, messages: int) -> None:
        self._part, self._messages = part, messages
        self._began = self._said = time.monotonic()

    def look(self, sent: int) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            rate = sent / (now - self._began)
            print(f"{self._part}: {sent:,} of {self._messages:,} messages, {rate:,.0f}/s", flush=True)


def fuzz_dispatcher(options: argparse.Namespace) -> dict[str, Any]:
    rng, sent, told, grown_mb = random.Random(options.seed), 0, Counter[str](), 0.0
    slowest_s, progress = dict[str, float](), Progress("dispatcher", options.messages)
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
        os.chmod(folder, 0o700)
        life = 0
        while sent < options.messages:
            journal = Path(folder) / f"journal{life // 3}"
            if life % 3 == 0 and life:
                shutil.rmtree(Path(folder) / f"journal{life // 3 - 1}")
            role = ROLES[life % len(ROLES)]
            # Every other round of roles is within the allowances of people, where most is answered by "later".
            allowance = Allowance() if life // len(ROLES) % 2 else Allowance(requests_per_s=1e9, blob_bytes=256 << 20)
            config = DispatcherConfig(
                server=SERVER,
                known=KNOWN,
                journal=str(journal),
                listening=Listening(folder=folder),
                allowance=allowance,
            )
            with (Path(folder) / "stderr").open("w+") as errors:
                try:
                    process, address = serving.started(config, errors=errors)
                except RuntimeError as error:
                    said = Path(errors.name).read_text()
                    raise Finding(f"the journal of life {life} cannot be read: {said[-3000:]}") from error
                try:
                    count = min(LIFE_MESSAGES, options.messages - sent)
                    more_mb, took_s = _one_life(rng, role, process, address, count, told)
                    grown_mb, slowest_s[role] = max(grown_mb, more_mb), max(slowest_s.get(role, 0.0), took_s)
                    sent += count
                except Finding as finding:
                    said = Path(errors.name).read_text()
                    raise Finding(f"{finding}; it said: {said[-3000:]}") from None
                finally:
                    if process.poll() is None:
                        process.send_signal(signal.SIGTERM)
                    serving.ended(process)
                if process.returncode:
                    said = Path(errors.name).read_text()
                    raise Finding(f"the dispatcher ended with {process.returncode}: {said[-3000:]}")
            progress.look(sent)
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
    pool = Pool(rng, hostile, list(kinds_of(Request).values()))
    honest = msgspec.msgpack.encode(ListJobs())
    is_alive = lambda: process.poll() is None  # noqa: E731
    number, batch, before = 0, dict[int, bytes](), dict[int, bytes]()
    try:
        for _ in range(0, count, BATCH):
            pool.renew(RENEWED)
            batch, before = {}, batch
            for _ in range(BATCH):
                number += 1
                body = batch[number] = pool.draw()
                sender.send(_asked(rng, number, body))
            number += 1
            sender.send(_asked(None, number, honest))
            if before:  # one batch is sent while the one before is answered
                began = time.monotonic()
                _take_answers(sender, number - BATCH - 1, {**before, **batch}, told, is_alive)
                slowest_s = max(slowest_s, time.monotonic() - began)
            most_mb = max(most_mb, resident_mb(process.pid) - before_mb)
            if most_mb > MOST_GROWTH_MB:
                raise Finding(f"the dispatcher grew by {most_mb:.0f} MB within {number} messages of a {role}")
        _take_answers(sender, number, batch, told, is_alive)
    finally:
        sender.close()
    if role not in TRUSTED:
        with ControlClient(address, VICTIM, name="victim") as control:
            if (now := _shown_to_victim(control)) != victims:
                raise Finding(f"a {role} changed another principal's job: {victims} became {now}")
    return most_mb, slowest_s


def _asked(rng: random.Random | None, number: int, body: bytes) -> bytes:
    """Return a request in its envelope, which is hostile now and then, too."""
    head = [PROTOCOL, number, 0]
    if rng is not None and rng.random() < 0.1:
        head[rng.randrange(3)] = rng.choice(NUMBERS)
    # By hand: what is no msgpack must be sent, too.
    return b"".join((b"\x94", *map(msgspec.msgpack.encode, head), body))


def _shown_to_victim(control: ControlClient) -> list[object]:
    """Return what stays the same of a job that nobody else may change."""
    answer = control.ask(ListJobs(), timeout_s=ANSWER_S, what="the victim's jobs")
    assert isinstance(answer, Jobs)
    return [
        (line.owner, line.epoch, line.ranks, line.splits_left, "cancelled" in line.status, "paused" in line.status)
        for line in answer.jobs
        if line.job == VICTIMS_JOB
    ]


def _take_answers(
    sender: Sender, until: int, batch: dict[int, bytes], told: Counter[str], is_alive: Callable[[], bool]
) -> None:
    for frame in sender.received(ANSWER_S, is_alive):
        tell = decode_tell(frame)
        told[type(tell.body).__name__] += 1
        if isinstance(tell.body, Refused) and OUR_FAULT in tell.body.reason:
            raise Finding(f"{tell.body.reason}: {batch.get(tell.number)!r}")
        if tell.number == until and not (isinstance(tell.body, Refused) and until in batch):
            return
    raise Finding(
        f"no answer to an honest request within {ANSWER_S:.0f} s, or the dispatcher ended, after "
        f"{list(batch.values())[-3:]}"
    )


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


@contextmanager
def _fellow(service: ps.LocalService) -> Iterator[Credentials]:
    """Give the key of another process of the service's one job, on another host: there is no such process."""
    agent, ended = serving.FakeAgent(service.address, key=service._processes.keys.agent), threading.Event()
    try:
        agent.register()
        runner = agent.expect_runner().runner
        beat = AgentBeat(agent=agent.agent, runners=(runner,))

        def live() -> None:
            while not ended.wait(1.0):
                agent.control.post(beat)

        beating = threading.Thread(target=live, daemon=True)
        beating.start()
        yield serving.RUNNER_KEYS[runner]
        ended.set()
        beating.join()
        leaving = AgentLeaving(agent=agent.agent, workers=(agent.worker,), gone=True)
        agent.control.ask(leaving, timeout_s=ANSWER_S, what="leaving")
    finally:
        ended.set()
        agent.close()


class Hostiles(NamedTuple):
    """Those of one kind who may speak to a runner: what they say, and how it is seen that it was heard."""

    key: Credentials
    pool: Pool
    farewell: Callable[[int], bytes]
    """Makes an honest message with a number."""
    answers: Callable[[bytes, int], bool]
    """Says whether a frame is the answer to it."""


def _of_readers(
    rng: random.Random, key: Credentials, honest: Sequence[msgspec.Struct], names: Sequence[str]
) -> Hostiles:
    return Hostiles(
        key,
        Pool(rng, Hostile(rng, names, honest), list(kinds_of(ToRunner).values())),
        lambda number: msgspec.msgpack.encode(
            CloseStream(stream=StreamId(f"{FAREWELL}{number}"), opening=1, leaving=True)
        ),
        lambda frame, number: FAREWELL.encode() in frame and b"%d" % number in frame,
    )


def _of_fellows(rng: random.Random, key: Credentials, names: Sequence[str]) -> Hostiles:
    first = 1 << 40  # of numbers that nothing hostile has
    return Hostiles(
        key,
        Pool(rng, Hostile(rng, names), list(kinds_of(FromFellow).values())),
        lambda number: msgspec.msgpack.encode(
            ReadSplit(number=first + number, key="none", subject=b"", offset=0, count=1)
        ),
        lambda frame, number: msgspec.msgpack.encode(first + number) in frame,
    )


def _take_outputs(sender: Sender, hostiles: Hostiles, until: int, pid: int, heard: set[int]) -> int:
    """Return how many messages came back until that farewell was heard; what a runner logs goes to all readers.

    `heard` has the farewells that were answered: several threads do so, and that of the next batch may come first.
    """
    if until in heard:
        return 0
    for count, frame in enumerate(sender.received(ANSWER_S, lambda: Path(f"/proc/{pid}").exists()), 1):
        if RUNNERS_FAULT.encode() in frame:
            raise Finding(frame.decode(errors="replace"))
        heard.update(number for number in (until, until + BATCH) if hostiles.answers(frame, number))
        if until in heard:
            return count
    raise Finding(f"no farewell was answered within {ANSWER_S:.0f} s, or the runner has ended")


def fuzz_runner(options: argparse.Namespace) -> dict[str, Any]:
    rng, progress = random.Random(options.seed), Progress("runner", options.messages)
    found, grown_mb = Counter[str](), 0.0
    while found["messages"] < options.messages:
        count = min(RUNNER_LIFE_MESSAGES, options.messages - found["messages"])
        grown_mb = max(grown_mb, _one_runner(rng, count, found, progress))
        found["lives"] += 1
    return {**found, "grown_mb": round(grown_mb, 1)}


def _one_runner(rng: random.Random, count: int, found: Counter[str], progress: Progress) -> float:
    most_mb = 0.0
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
            with _fellow(service) as fellows_key:
                readers = _of_readers(rng, key, list(honest.values()), names)
                fellows = _of_fellows(rng, fellows_key.toward(address.key), names)
                before_mb, sent = resident_mb(pid), 0
                try:
                    until = time.monotonic() + RUNNER_LIFE_S
                    while sent < count and time.monotonic() < until:
                        turn, count_now = sent // CONNECTION_MESSAGES, min(CONNECTION_MESSAGES, count - sent)
                        hostiles = fellows if turn % FELLOWS_TURN == FELLOWS_TURN - 1 else readers
                        for more in _one_connection(hostiles, address, pid, sent, count_now):
                            found["answers"] += more
                            sent += BATCH
                            most_mb = max(most_mb, resident_mb(pid) - before_mb)
                            if most_mb > MOST_GROWTH_MB:
                                raise Finding(f"the runner grew by {most_mb:.0f} MB within {sent} messages")
                            progress.look(found["messages"] + sent)
                except (zmq.Again, FileNotFoundError) as error:
                    raise Finding(f"the runner ended within {sent} messages: {error}") from error
        if list(service.worker_pids().values()) != [pid]:
            raise Finding(f"the runner ended within {sent} messages")
        with (
            ps.range(5_000).map(abs).batch(16).distribute(service, job="after", limits=ps.Limits(timeout_s=60)) as after
        ):
            read = [int(value) for batch in after for value in batch]
        if sorted(read) != list(range(5_000)):
            raise Finding(f"a reader got {len(read)} of 5,000 elements after {sent} messages")
    found["messages"] += sent
    return most_mb


def _one_connection(hostiles: Hostiles, address: RunnerAddress, pid: int, first: int, count: int) -> Iterator[int]:
    """Send so many messages on one connection; give, by batch, how many came back. `first`: the number of the first."""
    sender, heard = Sender(address.socket, hostiles.key, data=True), set[int]()
    try:
        for number in range(first, first + count, BATCH):
            hostiles.pool.renew(RENEWED)
            for _ in range(BATCH):
                sender.send(hostiles.pool.draw())
            sender.send(hostiles.farewell(number + BATCH))
            # One batch is sent while the one before is heard.
            yield 0 if number == first else _take_outputs(sender, hostiles, number, pid, heard)
        _take_outputs(sender, hostiles, first + count, pid, heard)
    finally:
        sender.close()


PARTS = {"decoders": fuzz_decoders, "dispatcher": fuzz_dispatcher, "runner": fuzz_runner}


def main() -> int:
    if sys.argv[1:2] == ["guided"]:
        _be_guided(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all"], nargs="?", default="all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the decoders")
    parser.add_argument("--corpus", help="for the decoders: a folder")
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
