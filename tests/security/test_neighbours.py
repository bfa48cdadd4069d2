"""Another user of the same host: he gets no key, cannot answer in the service's place, nor use up what it has."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

import penstock as ps
from penstock.core.errors import AuthenticationError, DispatcherUnavailableError
from penstock.wire.control import ControlClient
from penstock.wire.messages import ListJobs
from penstock.wire.neighbours import DescriptorServer, receive_descriptor
from tests.keys import new_key
from tests.security.another_user import as_another_user, needs_root
from tests.waiting import wait_until

CONNECTIONS = 3_000


def sockets_of(pids: list[int]) -> set[str]:
    """Return the inodes of the sockets that processes have."""
    found = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    return found


def ports_of(pids: list[int]) -> set[int]:
    """Return the TCP ports that processes have bound, listening or not."""
    sockets, found = sockets_of(pids), set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


@needs_root
def test_a_service_of_one_host_has_no_port_and_its_sockets_are_out_of_reach() -> None:
    with ps.LocalService(workers=1) as service:
        loader = ps.range(100_000).batch(10).distribute(service, limits=ps.Limits(timeout_s=60))
        iterator = iter(loader)
        next(iterator)
        assert ports_of([os.getpid(), *service.pids()]) == set()
        file = service.service_file
        folder = file.parent
        sockets = [path for path in folder.iterdir() if path.is_socket()]
        assert {path.name.partition("-")[0] for path in sockets} == {"dispatcher", "runner"}

        def attack() -> list[str]:
            tried = []
            for path in sockets:
                with socket.socket(socket.AF_UNIX) as peer:
                    tried.append(_outcome(lambda peer=peer, path=path: peer.connect(str(path))))
            with socket.socket(socket.AF_UNIX) as impostor:
                tried.append(_outcome(lambda: impostor.bind(str(folder / "mine"))))
            tried.append(_outcome(lambda: os.rename(folder, f"{folder}-taken")))
            tried.append(_outcome(file.read_bytes))
            return tried

        assert as_another_user(attack) == ["EACCES"] * (len(sockets) + 3)
        next(iterator)
        loader.close()


def _outcome(act: object) -> str:
    try:
        act()  # type: ignore[operator]
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


@pytest.mark.parametrize("mechanism", ["CURVE", "PLAIN", "silence"])
def test_who_answers_at_the_port_of_a_dispatcher_that_was_killed_learns_nothing(mechanism: str) -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        port = impostor.getsockname()[1]
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.encode().ljust(20, b"\0") + b"\0" + bytes(31)

        def listen() -> None:
            peer, _ = impostor.accept()
            with peer:
                peer.settimeout(5)
                try:
                    while piece := peer.recv(65_536):  # the victim speaks first: it hangs up on what it cannot like
                        if not heard and mechanism != "silence":
                            peer.sendall(greeting + b"\x04\x08\x07WELCOME")
                        heard.extend(piece)
                except OSError:
                    pass

        threading.Thread(target=listen, daemon=True).start()
        key = new_key("trainer")
        with ControlClient(f"tcp://127.0.0.1:{port}", key, name="victim") as client:
            with pytest.raises((AuthenticationError, DispatcherUnavailableError)):
                client.ask(ListJobs(), timeout_s=1.0, what="the jobs")
            wait_until(lambda: len(heard) > 0, "the victim's greeting")
    assert key.secret.encode() not in heard and key.public.encode() not in heard


def test_a_server_with_another_key_is_not_taken_for_the_dispatcher() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    impostor.curve_server = True
    impostor.curve_secretkey = new_key().secret.encode()
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    with (
        ControlClient(f"tcp://127.0.0.1:{port}", new_key("trainer"), name="victim") as client,
        pytest.raises(AuthenticationError, match="not who our key is for"),
    ):
        client.ask(ListJobs(), timeout_s=10.0, what="the jobs")
    assert not impostor.poll(0)
    context.destroy(linger=0)


def memory_name(pid: int) -> str:
    """Return the abstract address at which a runner hands out its memory."""
    sockets = sockets_of([pid])
    entries = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    (name,) = {entry[7][1:] for entry in entries if entry[6] in sockets and entry[7:] and "@penstock-" in entry[7]}
    return name


@needs_root
def test_thousands_of_connections_of_another_user_do_not_end_a_job() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], CONNECTIONS + 500), limits[1]))
    try:
        with ps.LocalService(workers=1) as service:
            dataset = ps.range(10**6).map(_opens_a_file)
            small = ps.Limits(timeout_s=60, memory_bytes=1 << 20)
            with dataset.distribute(service, order="deterministic", limits=small) as loader:
                iterator = iter(loader)
                read = [next(iterator)]
                (runner,) = service.worker_pids().values()
                name = memory_name(runner)
                resource.prlimit(runner, resource.RLIMIT_NOFILE, (256, 256))
                connected: list[int] = []
                attack = threading.Thread(
                    target=lambda: connected.append(as_another_user(lambda: _connect_often(name)))
                )
                attack.start()
                while attack.is_alive() or len(read) < 500:
                    read.append(next(iterator))
                assert connected == [CONNECTIONS]
                assert len(set(read)) == len(read)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _opens_a_file(number: int) -> int:
    time.sleep(0.005)
    with open(os.devnull):
        return number


def _connect_often(name: str) -> int:
    peers = []
    for _ in range(CONNECTIONS):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(f"\0{name}")
        peers.append(peer)
    time.sleep(0.5)
    return len(peers)


@needs_root
def test_a_descriptor_is_not_for_another_user_even_with_the_secret(tmp_path: Path) -> None:
    with open(tmp_path / "memory", "wb+") as file:
        file.write(b"what the trainer reads")
        file.flush()
        server = DescriptorServer(file.fileno(), 22)
        try:
            assert as_another_user(lambda: receive_descriptor(server.name, 5.0)) is None
            found = receive_descriptor(server.name, 5.0)
            assert found is not None and found[1] == 22
            os.close(found[0])
            wait_until(lambda: server.refused == 1, "the refusal to be counted")
        finally:
            server.close()


@needs_root
def test_a_secret_of_memory_is_not_shown_to_another_user_who_took_the_name() -> None:
    heard: list[bytes] = []
    ready, go = os.pipe()

    def impostor() -> bytes:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0penstock-taken")
            listener.listen()
            os.write(go, b"!")
            peer, _ = listener.accept()
            return peer.recv(100)

    thread = threading.Thread(target=lambda: heard.append(as_another_user(impostor)))
    thread.start()
    os.read(ready, 1)
    assert receive_descriptor("penstock-taken.secret", 5.0) is None
    thread.join(10)
    assert heard == [b""]
