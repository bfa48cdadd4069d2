"""`penstock serve`, `dispatcher`, `worker`, `jobs`, `drain` and `keys`, as a shell runs them."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import AuthenticationError, NotPermittedError
from penstock.processes.service_processes import free_port
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials, find_service
from penstock.wire.messages import ListJobs
from tests.running import Running
from tests.waiting import wait_gone, wait_until

COMMAND = str(Path(sys.executable).parent / "penstock")
DEADLINE_S = 30.0


def children_of(pid: int) -> list[int]:
    """Return all processes below one."""
    found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [below for each in found for below in children_of(each)]


def running(*arguments: str, **environment: str) -> AbstractContextManager[Running]:
    return Running.command(COMMAND, *arguments, **environment)


def penstock(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_runs_until_it_is_told_to_end(tmp_path, number):
    file = tmp_path / "service.json"
    with running("serve", "--workers", "1", "--service-file", str(file)) as serve:
        address = serve.wait_said("serving at").split()[2]
        serve.wait_said("distribute(")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert find_service(str(file)).address == address
        listed = penstock("jobs", "--service", str(file))
        assert listed.returncode == 0, listed.stderr
        no_jobs, columns, _ = [line for line in listed.stdout.splitlines() if line]
        assert no_jobs.startswith("no jobs") and columns.split()[:2] == ["worker", "host"]
        pids = children_of(serve.process.pid)
        assert len(pids) == 3
        assert serve.end(number) == 0
        wait_gone(*pids)
        assert not file.exists()


def test_a_service_with_nothing_to_list_says_so(tmp_path):
    file = tmp_path / "service.json"
    with running("serve", "--workers", "0", "--service-file", str(file)):
        wait_until(file.exists, "the service file")
        listed = penstock("jobs", "--service", str(file))
        assert listed.returncode == 0, listed.stderr
        jobs, workers = listed.stdout.strip().split("\n\n")
        assert jobs.startswith("no jobs") and "\n" not in jobs
        assert workers.startswith("no workers") and "penstock worker" in workers


def test_serve_starts_a_killed_dispatcher_again(tmp_path):
    with running("serve", "--workers", "0") as serve:
        file = serve.wait_said("service file:").split()[2]
        (nursery,) = (
            int(each)
            for each in Path(f"/proc/{serve.process.pid}/task/{serve.process.pid}/children").read_text().split()
        )
        os.kill(children_of(nursery)[0], signal.SIGKILL)
        serve.wait_said("killed by SIGKILL; it is started again")
        assert penstock("jobs", PENSTOCK_SERVICE=file).returncode == 0
        assert serve.end() == 0


def test_serve_starts_everything_again_when_all_of_it_was_killed():
    with running("serve", "--workers", "1") as serve:
        file = serve.wait_said("service file:").split()[2]
        nursery, *others = children_of(serve.process.pid)
        os.kill(nursery, signal.SIGKILL)
        serve.wait_said("(killed by SIGKILL); they are started again")
        wait_gone(*others)
        assert len(list(ps.range(10).distribute(file, limits=ps.Limits(timeout_s=DEADLINE_S)))) == 10
        assert serve.end() == 0


def test_a_dispatcher_started_again_lets_its_workers_in(tmp_path):
    file = tmp_path / "service.json"
    arguments = ("dispatcher", "--service-file", str(file), "--journal", str(tmp_path / "j"))
    with running(*arguments) as first:
        first.wait_said("serving at")
        with running("worker", "--dispatcher", str(file), "--processes", "1") as worker:
            (name,) = worker.wait_said("registered at").rpartition(": ")[2].split(", ")
            first.process.kill()
            first.process.wait(20)
            with running(*arguments) as second:
                second.wait_said("serving at")
                wait_until(lambda: name.strip() in penstock("jobs", "--service", str(file)).stdout, "its worker")


def test_a_worker_follows_its_service_file_to_a_dispatcher_at_another_port(tmp_path):
    file, keys = str(tmp_path / "service.json"), tmp_path / "keys"
    assert main(["keys", "make", str(keys)]) == 0
    arguments = ("dispatcher", "--port", "0", "--service-file", file, "--keys", str(keys / "server.json"))
    with running(*arguments) as first:
        first.wait_said("serving at")
        with running("worker", "--dispatcher", file, "--processes", "1", "--keys", str(keys / "agent.json")) as worker:
            worker.wait_said("registered at")
            before = find_service(file).address
            first.process.kill()
            first.process.wait()
            with taken(before), running(*arguments) as second:
                second.wait_said("serving at")
                after = find_service(file).address
                assert after != before
                worker.wait_said(f"registered at {after}")
                with ps.range(100).batch(10).distribute(file, limits=ps.Limits(timeout_s=DEADLINE_S)) as loader:
                    assert len(list(loader)) == 10


def taken(address: str) -> socket.socket:
    """Return a socket that has this port."""
    port = int(address.rpartition(":")[2])
    return free_port("127.0.0.1", (port, port))


def test_a_killed_serve_leaves_nothing(tmp_path):
    with running("serve", "--workers", "1") as serve:
        serve.wait_said("serving at")
        pids = children_of(serve.process.pid)
        serve.process.kill()
        serve.process.wait()
        wait_gone(*pids)


def test_a_dispatcher_and_a_worker_started_in_either_order(tmp_path):
    file = tmp_path / "service.json"
    with running("worker", "--dispatcher", str(file), "--processes", "2", "--tags", "fast,big") as worker:
        worker.wait_said("waiting for the dispatcher")
        with running("dispatcher", "--service-file", str(file), "--journal", str(tmp_path / "j")) as dispatcher:
            dispatcher.wait_said("serving at")
            names = worker.wait_said("registered at").rpartition(": ")[2].split(", ")
            assert len(names) == 2
            listed = penstock("jobs", "--service", str(file)).stdout
            assert all(name.strip() in listed for name in names) and "fast" in listed
            drained = penstock("drain", names[0], "--service", str(file))
            assert drained.returncode == 0 and "draining" in drained.stdout, drained.stderr
            pids = children_of(worker.process.pid)
            assert worker.end() == 0
            assert "left" in worker.process.stdout.read()
            wait_gone(*pids)
            wait_until(lambda: names[1].strip() not in penstock("jobs", "--service", str(file)).stdout, "its absence")
            assert dispatcher.end(signal.SIGINT) == 0


def test_a_worker_that_is_told_to_end_hands_its_work_over(tmp_path):
    file = str(tmp_path / "service.json")
    with (
        running("serve", "--workers", "1", "--service-file", file) as serve,
        running("worker", "--dispatcher", file, "--processes", "1") as worker,
    ):
        serve.wait_said("serving at")
        worker.wait_said("registered at")
        seen: list[int] = []
        with ps.range(3000).map(slow).batch(10).distribute(file, limits=ps.Limits(timeout_s=60)) as loader:
            for step, batch in enumerate(loader):
                seen.extend(batch.tolist())
                if step == 20:
                    worker.process.send_signal(signal.SIGTERM)
        assert sorted(seen) == list(range(3000))
        assert worker.process.wait(DEADLINE_S) == 0
        workers = penstock("jobs", "--service", file).stdout.split("\n\n")[1]
        assert len(workers.splitlines()) == 2, workers  # the header, and the one of `serve`


def slow(number: int) -> int:
    time.sleep(0.0005)
    return number


def test_keys_are_made_rotated_revoked_and_listed_while_a_dispatcher_runs(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert main(["keys", "make", str(folder)]) == 0
    server, log = str(folder / "server.json"), str(tmp_path / "audit.jsonl")
    with running("dispatcher", "--port", "0", "--keys", server, "--audit-log", log) as dispatcher:
        address = dispatcher.wait_said("serving at").split()[2]
        assert main(["keys", "make", str(folder), "bob"]) == 0
        bob = Credentials.read(folder / "trainer-bob.json")

        def asks(key):
            try:
                with ControlClient(address, key, name="test") as control:
                    return control.ask(ListJobs(), timeout_s=20, what="jobs").jobs == ()
            except (AuthenticationError, NotPermittedError):  # at the door, or at the first message
                return False

        wait_until(lambda: asks(bob), "the key that was made")
        assert main(["keys", "rotate", str(folder), "bob", "--keep-old-seconds", "600"]) == 0
        new = Credentials.read(folder / "trainer-bob.json")
        assert new.public != bob.public
        wait_until(lambda: asks(new), "the new key")
        assert asks(bob), "both are valid for a while"
        assert main(["keys", "revoke", str(folder), "bob", "--key", bob.public[:12]]) == 0
        wait_until(lambda: not asks(bob), "the end of the old key")
        assert asks(new)
        assert main(["keys", "list", str(folder)]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainer/bob ")]
        assert len(lines) == 3, "one revoked just now, and two of the list"
        assert "revoked 2" in lines[1] and lines[2].endswith("valid")
        assert main(["keys", "make", str(folder), "bob"]) == 2
        assert main(["keys", "revoke", str(folder), "nobody"]) == 2
        assert "no valid key of 'nobody'" in capsys.readouterr().err
    did = [json.loads(line)["did"] for line in Path(log).read_text().splitlines()]
    assert did.count("key made") == 2 and did.count("key revoked") == 1
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())


def test_keys_let_a_service_be_reached_by_tcp(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert main(["keys", "make", str(folder)]) == 0
    for name in ("server", "agent", "trainer", "operator"):
        assert stat.S_IMODE((folder / f"{name}.json").stat().st_mode) == 0o600
    secrets = [Credentials.read(folder / f"{name}.json").secret for name in ("agent", "trainer", "operator")]
    assert len(set(secrets)) == 3
    assert main(["keys", "make", str(folder)]) == 2
    assert "not overwritten" in capsys.readouterr().err
    server, agent, operator = (str(folder / f"{name}.json") for name in ("server", "agent", "operator"))
    with running(
        "dispatcher", "--bind", "0.0.0.0", "--advertise", "127.0.0.1", "--port", "0", "--keys", server
    ) as head:
        address = head.wait_said("serving at").split()[2]
        with running(
            "worker", "--dispatcher", address, "--bind", "0.0.0.0", "--processes", "1", "--keys", agent
        ) as worker:
            name = worker.wait_said("registered at").rpartition(": ")[2].strip()
            listed = penstock("jobs", "--service", address, PENSTOCK_KEYS=operator)
            assert name in listed.stdout, listed.stderr
            other = tmp_path / "other"
            assert main(["keys", "make", str(other)]) == 0
            key = Credentials.read(other / "agent.json").toward(Credentials.read(agent).server)
            key.write(other / "agent.json")
            stranger = penstock(
                "worker", "--dispatcher", address, "--processes", "1", "--keys", str(other / "agent.json")
            )
            assert stranger.returncode == 1 and "refused us" in stranger.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve", "--bind", "0.0.0.0"], 2, "penstock keys"),
        (["dispatcher", "--bind", "0.0.0.0"], 2, "penstock keys"),
        (["dispatcher"], 2, "--service-file"),
        (["worker"], 2, "--dispatcher"),
        (["worker", "--dispatcher", "tcp://127.0.0.1:1", "--bind", "0.0.0.0"], 1, "PENSTOCK_KEYS"),
        (["worker", "--dispatcher", "tcp://head:5050", "--keys", "nowhere.json"], 1, "does not exist"),
        (["jobs"], 1, "PENSTOCK_SERVICE"),
        (["jobs", "cancel"], 2, "which job"),
        (["serve", "--keys", "nowhere.json"], 1, "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_at_once(arguments, code, message, capsys, monkeypatch):
    for name in ("PENSTOCK_SERVICE", "PENSTOCK_KEYS"):
        monkeypatch.delenv(name, raising=False)
    with alarm(20):
        assert main(arguments) == code
    assert message in capsys.readouterr().err


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """A command that waits for ever must not: it is told to end."""
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "some"],
        ["--workers", "own"],
        ["--workers", "0-0"],
        ["--workers", "3-2"],
        ["--port", "70000"],
        ["--port-range", "9-1"],
        ["--threads", "0"],
        ["--tags", "a,,b"],
        ["--tags", ""],
    ],
)
def test_arguments_that_are_none_are_named(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["serve", *arguments])
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_service_may_have_no_worker_until_a_job_wants_one(tmp_path):
    with running("serve", "--workers", "0-2") as serve:
        file = serve.wait_said("service file:").split()[2]
        assert any("with 0 to 2 workers" in line for line in serve.said)
        assert "no workers" in penstock("jobs", "--service", file).stdout
        with ps.range(20).distribute(file, limits=ps.Limits(timeout_s=60)) as loader:
            assert sorted(loader) == list(range(20))


def test_a_job_is_never_asked_to_have_no_worker(capsys):
    with pytest.raises(SystemExit):
        main(["scale", "job", "0-3"])
    assert "0 at the least" in capsys.readouterr().err


def test_how_many_workers_a_job_has_is_told_changed_and_priced(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text(
        "".join(f'[{kind}]\nper_h = 3600.0\nsource = "x"\ndate = "2026"\n' for kind in ("worker", "trainer"))
    )
    with running("serve", "--workers", "1-2") as serve:
        file = serve.wait_said("service file:").split()[2]
        assert any("with 1 to 2 workers" in line for line in serve.said)
        placement = ps.Placement(workers="auto")
        with ps.range(10_000).batch(2).distribute(file, job="scaled", placement=placement) as loader:
            batches = iter(loader)
            next(batches)
            why = penstock("jobs", "why", "scaled", "--service", file)
            assert why.returncode == 0 and "start with the least" in why.stdout, why.stderr
            assert penstock("scale", "scaled", "2", "--service", file).stdout == "scaled: workers 2\n"

            def has_two() -> bool:
                next(batches)
                listed = penstock("jobs", "--service", file).stdout
                return "scaled: 2 workers: 2 were asked for\n" in listed

            wait_until(has_two, "two workers")
            cost = penstock("jobs", "cost", "scaled", "--prices", str(prices), "--service", file)
            columns, row = (line.split() for line in cost.stdout.splitlines()[:2])
            assert columns[:2] == ["job", "total"] and row[0] == "scaled" and float(row[1]) > 0, cost
        for wrong, said in (
            (("jobs", "why", "nobody"), "there is no job 'nobody'"),
            (("jobs", "cost"), "give --prices a TOML file"),
            (("scale", "nobody", "2"), "there is no job 'nobody'"),
        ):
            refused = penstock(*wrong, "--service", file)
            assert refused.returncode != 0 and said in refused.stderr, refused
