from __future__ import annotations

import errno
import os
import socket as sockets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from penstock.core.errors import CannotListenError, InvalidArgumentError, PenstockError
from penstock.wire.addresses import Listening, RunnerAddress, advertised, host_id, is_loopback, unix_path
from penstock.wire.credentials import Credentials, ServiceFile, find_service
from penstock.wire.framing import LISTENER_FRAME_BYTES, has_arrived, key_of, sender_of
from penstock.wire.principals import Principal
from penstock.wire.sockets import UNIX_BUFFER_BYTES, Dialled, Guard, Watch, bind_router, dial
from tests.keys import SERVER, knows, new_key
from tests.waiting import wait_until
from tests.wire.services import WAIT_S

KEY = new_key()
WAIT_MS = int(WAIT_S * 1000)


class Server:
    def __init__(self, credentials: Credentials, *, data: bool = True, **given: Any) -> None:
        self.context = zmq.Context()
        self.guard = Guard(self.context, knows(credentials))
        self.guard.start()
        try:
            self.socket, self.address = bind_router(self.context, Listening(**given), "x", SERVER, data=data)
        except BaseException:
            self.guard.close()
            self.context.destroy(linger=0)
            raise
        self.port = 0 if self.address.startswith("ipc") else int(self.address.rpartition(":")[2])

    def close(self) -> None:
        self.socket.close(linger=0)
        self.guard.close()
        self.context.destroy(linger=0)

    def echo(self) -> None:
        assert self.socket.poll(WAIT_MS), "nothing arrived"
        self.socket.send_multipart(self.socket.recv_multipart())


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(KEY)
    yield made
    made.close()


@pytest.fixture
def private() -> Iterator[Path]:
    """A folder that only this user can enter, and whose path is short enough."""
    with tempfile.TemporaryDirectory(prefix="ps-") as made:
        yield Path(made)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def exchange(server: Server, client: Dialled) -> None:
    assert client.poll(WAIT_MS, zmq.POLLOUT), "not let in"
    client.send(b"hello")
    server.echo()
    assert client.poll(WAIT_MS), "no echo"
    assert client.recv() == b"hello"


def until_lost(watch: Watch) -> str:
    while (reason := watch.lost()) is None:
        assert watch.socket.poll(WAIT_MS), "the loss was not noticed"
    return reason


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_who_shows_a_key_that_is_known_is_let_in_and_named_in_each_message(
    context: zmq.Context[zmq.Socket[bytes]], way: str, private: Path
) -> None:
    server = Server(KEY, folder=str(private) if way == "unix" else "")
    client = dial(context, KEY, server.address, data=True)
    watch = Watch(client)
    exchange(server, client)
    assert watch.lost() is None and watch.connected
    assert server.guard.refused == 0
    client.send(b"who am I?")
    assert server.socket.poll(WAIT_MS)
    _, frame = server.socket.recv_multipart(copy=False)
    assert sender_of(frame) == KEY.principal and key_of(frame) == KEY.public
    client.close()
    server.close()


def buffers_of(path: str) -> list[int]:
    """Return the size of the sending buffer of each connection that this process has accepted at a Unix socket."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with sockets.socket(fileno=os.dup(int(name))) as connection:
                listens = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)
                if connection.getsockname() == path and not listens:
                    found.append(connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF))
    return found


def test_a_connection_that_carries_data_over_a_unix_socket_has_room_for_it(
    context: zmq.Context[zmq.Socket[bytes]], private: Path
) -> None:
    server = Server(KEY, folder=str(private))
    clients = [dial(context, KEY, server.address, data=True) for _ in range(2)]
    for client in clients:
        exchange(server, client)
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    expected = 2 * min(UNIX_BUFFER_BYTES, most)  # the kernel doubles what it is asked for
    wait_until(lambda: buffers_of(unix_path(server.address)) == [expected] * 2, "room in both connections")
    server.close()


def test_asking_what_has_arrived_takes_nothing(context: zmq.Context[zmq.Socket[bytes]], server: Server) -> None:
    client = dial(context, KEY, server.address, data=True)
    assert not has_arrived(client)
    assert client.poll(WAIT_MS, zmq.POLLOUT), "not let in"
    client.send(b"hello")
    server.echo()
    assert client.poll(WAIT_MS), "no echo"
    assert has_arrived(client) and has_arrived(client)
    assert client.recv() == b"hello"
    assert not has_arrived(client)
    client.close()


def test_a_handshake_waits_until_it_is_known_whose_key_it_showed(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    asked: list[tuple[str, Callable[[Principal | None], None]]] = []
    server = Server(KEY)
    server.guard._inquire = lambda verifier, tell: asked.append((verifier, tell))
    late, stranger = new_key("trainer", "late"), new_key("trainer", "stranger")
    clients = [dial(context, each, server.address, data=True) for each in (late, late, stranger)]
    wait_until(lambda: len(asked) == 2, "both keys to be asked about, each once")
    assert not any(client.poll(50, zmq.POLLOUT) for client in clients)
    for verifier, tell in asked:
        tell(late.principal if verifier == late.public else None)
    exchange(server, clients[0])
    exchange(server, clients[1])
    watch = Watch(clients[2])
    until_lost(watch)
    assert watch.refused
    for client in clients:
        client.close()
    server.close()


def test_a_folder_that_others_can_enter_is_neither_bound_nor_dialled(
    context: zmq.Context[zmq.Socket[bytes]], private: Path
) -> None:
    server = Server(KEY, folder=str(private))
    private.chmod(0o755)
    with pytest.raises(InvalidArgumentError, match="0700"):
        dial(context, KEY, server.address, data=True)
    with pytest.raises(InvalidArgumentError, match="0700"):
        Server(KEY, folder=str(private))
    server.close()


@pytest.mark.parametrize("wrong", ["key", "nothing", "server"])
def test_others_are_refused_and_counted_and_nobody_else_is_disturbed(
    server: Server, context: zmq.Context[zmq.Socket[bytes]], wrong: str
) -> None:
    good = dial(context, KEY, server.address, data=True)
    exchange(server, good)
    credentials = KEY.toward(KEY.public) if wrong == "server" else new_key()
    if wrong == "nothing":
        bad: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        bad.setsockopt(zmq.IMMEDIATE, 1)
        bad.setsockopt(zmq.RECONNECT_IVL, -1)
        bad.connect(server.address)
    else:
        bad = dial(context, credentials, server.address, data=True)
        assert isinstance(bad, Dialled)
        watch = Watch(bad)
        until_lost(watch)
        assert watch.refused == (wrong == "key")
    wait_until(lambda: server.guard.refused == 1, "the refusal to be counted")
    assert not bad.poll(0, zmq.POLLOUT)
    exchange(server, good)
    bad.close(linger=0)
    good.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5, b"\xff" + b"\0" * 8 + b"\x7f\x03\0NULL" + b"\0" * 60, b"\0" * 4096, b""],
    ids=["http", "another mechanism", "zeros", "nothing"],
)
def test_garbage_is_refused_and_counted(
    server: Server, context: zmq.Context[zmq.Socket[bytes]], garbage: bytes
) -> None:
    good = dial(context, KEY, server.address, data=True)
    exchange(server, good)
    with sockets.create_connection(("127.0.0.1", server.port)) as peer:
        peer.sendall(garbage)
        if not garbage:
            peer.shutdown(sockets.SHUT_WR)
        wait_until(lambda: server.guard.refused == 1, "the refusal to be counted")
    exchange(server, good)
    good.close()


def test_a_frame_over_the_limit_ends_its_senders_connection_only(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    good, bad = (dial(context, KEY, server.address, data=True) for _ in range(2))
    watch = Watch(bad)
    exchange(server, good)
    exchange(server, bad)
    bad.send(bytes(LISTENER_FRAME_BYTES + 1))
    until_lost(watch)
    exchange(server, good)
    assert not server.socket.poll(0)
    good.close()
    bad.close()


def test_a_lost_connection_is_noticed_and_a_data_socket_stays_lost(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server = Server(KEY)
    client = dial(context, KEY, server.address, data=True)
    watch = Watch(client)
    exchange(server, client)
    port = server.port
    server.close()
    assert "lost" in until_lost(watch)
    again = Server(KEY, port=port)
    other = dial(context, KEY, again.address, data=True)
    exchange(again, other)
    assert not client.poll(0, zmq.POLLOUT)
    with pytest.raises(zmq.Again):
        client.send(b"for whom?", zmq.NOBLOCK)
    client.close()
    other.close()
    again.close()


def test_nobody_at_the_address_is_noticed(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    client = dial(context, KEY, "tcp://127.0.0.1:1", data=True)
    assert "refused" in until_lost(Watch(client))
    client.close()


def test_sending_to_a_peer_that_is_gone_raises(server: Server, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    client = dial(context, KEY, server.address, data=True)
    client_id = client.getsockopt(zmq.ROUTING_ID)
    exchange(server, client)
    client.close()

    def gone() -> bool:
        try:
            server.socket.send_multipart([client_id, b"late"], zmq.NOBLOCK)  # type: ignore[list-item]
        except zmq.ZMQError as error:
            return error.errno == errno.EHOSTUNREACH
        return False

    wait_until(gone, "the peer to be unknown")


def test_ports_of_a_range_are_used_and_a_taken_one_is_an_error() -> None:
    first = Server(KEY)
    second = Server(KEY, port_range=(first.port, min(first.port + 50, 65535)))
    assert first.port < second.port <= first.port + 50
    for given in ({"port": first.port}, {"port_range": (first.port, first.port)}):
        for data in (True, False):
            with pytest.raises(CannotListenError, match="another --port"):
                Server(KEY, data=data, **given)
    first.close()
    second.close()


def test_a_bind_needs_a_guard_and_an_address_of_this_host(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(PenstockError, match="Guard"):
        bind_router(context, Listening(), "x", SERVER, data=False)
    guard = Guard(context, knows(KEY))
    guard.start()
    with pytest.raises(InvalidArgumentError, match="not an address"):
        bind_router(context, Listening(bind="no such host"), "x", SERVER, data=False)
    with pytest.raises(InvalidArgumentError, match="who is there"):
        dial(context, KEY.toward(""), "tcp://127.0.0.1:1", data=False)
    for bind in ("0.0.0.0", "*", "localhost"):
        for data in (True, False):
            socket, address = bind_router(context, Listening(bind=bind, advertise="node7"), "x", SERVER, data=data)
            assert address.startswith("tcp://node7:")
            client = dial(context, KEY, address.replace("node7", "127.0.0.1"), data=data)
            assert client.poll(WAIT_MS, zmq.POLLOUT), bind
            client.close()
            socket.close(linger=0)
    guard.close()


def test_sockets_of_one_context_come_and_go_without_stopping_one_another(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    guard = Guard(context, knows(KEY))
    guard.start()
    for number in range(60):
        socket, address = bind_router(context, Listening(), "x", SERVER, data=bool(number % 2))
        client = dial(context, KEY, address, data=bool(number % 2))
        assert client.poll(WAIT_MS, zmq.POLLOUT), number
        client.close()
        socket.close(linger=0)
    guard.close()


@pytest.mark.parametrize("closed", ["nothing", "sockets"])
def test_destroying_a_context_ends_its_guard_and_does_not_hang(closed: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Guard(context, knows(KEY))
    guard.start()
    socket, address = bind_router(context, Listening(), "x", SERVER, data=True)
    client = dial(context, KEY, address, data=True)
    assert client.poll(WAIT_MS, zmq.POLLOUT)
    if closed == "sockets":
        client.close()
        socket.close(linger=0)
    context.destroy(linger=0)
    guard.close()


def test_no_descriptor_is_left_behind(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    def once() -> None:
        server = Server(KEY)
        own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = dial(own, KEY, server.address, data=True)
        exchange(server, client)
        client.close()
        own.destroy(linger=0)
        server.close()

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_service_file_is_its_owners_only_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "service.json"
    agent = new_key("agent")
    written = ServiceFile(address="ipc:///tmp/x/dispatcher", credentials=new_key("trainer"), others=(agent,))
    written.write(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert ServiceFile.read(path) == written
    assert find_service(str(path)).credentials == written.credentials
    assert find_service(str(path), "agent").credentials == agent
    assert find_service(str(path), "operator").credentials == written.credentials, "there is no other"
    assert os.listdir(path.parent) == ["service.json"]
    assert agent.secret not in repr(written)


def test_a_service_is_found_by_address_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_SERVICE", "PENSTOCK_KEYS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidArgumentError, match="PENSTOCK_KEYS"):
        find_service("tcp://node7:5050")
    key = new_key()
    key.write(tmp_path / "key")
    monkeypatch.setenv("PENSTOCK_KEYS", str(tmp_path / "key"))
    monkeypatch.setenv("PENSTOCK_SERVICE", "tcp://node7:5050")
    assert find_service(None).credentials == key


@pytest.mark.parametrize(
    "text", ["", "grpc://x:1", "ipc:///tmp/x", "tcp://x", "tcp://x:99999", "tcp://:5", "/no/such/file", "/"], ids=repr
)
def test_what_names_no_service_is_a_value_error_at_once(text: str) -> None:
    with pytest.raises(ValueError):
        find_service(text)


def test_addresses() -> None:
    assert is_loopback("127.0.0.9") and is_loopback("localhost") and is_loopback("::1") and not is_loopback("0.0.0.0")
    assert advertised("127.0.0.1", 7, None) == "tcp://127.0.0.1:7"
    assert advertised("0.0.0.0", 7, "node") == "tcp://node:7"
    assert advertised("0.0.0.0", 7, "node:9") == "tcp://node:9"
    assert advertised("::1", 7, None) == "tcp://[::1]:7"
    assert advertised("::", 7, "fe80::1") == "tcp://[fe80::1]:7"
    assert "0.0.0.0" not in advertised("0.0.0.0", 7, None)
    assert host_id() == host_id()
    address = RunnerAddress(socket="tcp://a:1", key=KEY.public, slab="name.secret", host="h")
    assert RunnerAddress.parse(address.text()) == address
    assert "secret" not in repr(address)
    with pytest.raises(ValueError):
        RunnerAddress.parse("nonsense")
