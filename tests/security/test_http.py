"""The HTTP side: who is answered, and what somebody who only wants to be in the way can do."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.dispatcher import http
from tests.dispatcher.serving import Served, served
from tests.security.web import get
from tests.waiting import wait_until


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return tmp_path / "http-token"


@pytest.fixture
def running(token_file: Path) -> Iterator[Served]:
    with served(http_port=0, http_token_file=str(token_file)) as running:
        yield running


def port_of(running: Served) -> int:
    assert running.dispatcher.http_port is not None
    return running.dispatcher.http_port


def test_metrics_are_for_who_shows_the_token_and_probes_for_all(running: Served, token_file: Path) -> None:
    port, token = port_of(running), token_file.read_text().strip()
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert get(port, "/metrics")[0] == 401
    assert get(port, "/metrics", token="wrong")[0] == 401
    assert get(port, "/metrics", token=token[:-1])[0] == 401
    assert get(port, "/metrics", token="ä")[0] == 401
    status, text = get(port, "/metrics", token=token)
    assert status == 200 and "penstock_dispatcher_jobs" in text
    assert get(port, "/livez") == (200, "alive") and get(port, "/readyz") == (200, "ready")


def test_a_token_that_was_replaced_is_the_one_that_counts(running: Served, token_file: Path) -> None:
    before = token_file.read_text().strip()
    token_file.write_text("another token that is long enough\n")
    assert get(port_of(running), "/metrics", token=before)[0] == 401
    assert get(port_of(running), "/metrics", token="another token that is long enough")[0] == 200
    token_file.unlink()
    assert get(port_of(running), "/metrics", token=before)[0] == 503


def test_without_a_token_nobody_is_shown_metrics() -> None:
    with served(http_port=0) as running:
        status, text = get(port_of(running), "/metrics")
        assert status == 403 and "--http-token FILE" in text


def test_a_token_that_can_be_guessed_is_refused_at_start(token_file: Path) -> None:
    token_file.write_text("short")
    with (
        pytest.raises(InvalidArgumentError, match="5 characters: too few"),
        served(http_port=0, http_token_file=str(token_file)),
    ):
        pass


def test_a_name_of_somebody_elses_is_not_answered(running: Served) -> None:
    port = port_of(running)
    for path in ("/metrics", "/livez", "/readyz"):
        assert get(port, path, host="evil.example")[0] == 421
        assert get(port, path, host="evil.example:80")[0] == 421
    for name in ("localhost", f"127.0.0.1:{port}", "[::1]:1", "10.1.2.3", socket.gethostname()):
        assert get(port, "/livez", host=name) == (200, "alive")


def test_it_listens_on_loopback_wherever_the_dispatcher_does() -> None:
    with served(http_port=0) as running:
        port = port_of(running)
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening


def threads() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_many_connections_take_few_threads_and_probes_are_answered_beside_them(running: Served) -> None:
    port = port_of(running)
    with contextlib.ExitStack() as stack:
        for number in range(100):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            if number % 2:
                peer.sendall(b"GET /livez HTT")  # and no more
            assert threads() <= http.MAX_CONNECTIONS + 1
        assert get(port, "/livez") == (200, "alive")
        assert threads() <= http.MAX_CONNECTIONS + 1


def test_who_reads_or_writes_slowly_is_cut_off(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_S", 0.5)
    with socket.create_connection(("127.0.0.1", port_of(running)), timeout=10) as slow:
        stop = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                slow.sendall(b"GET /livez HTTP/1.1\r\n")
                while not stop.wait(0.05):
                    slow.sendall(b"X: y\r\n")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert slow.recv(1000) == b""
        except ConnectionResetError:
            pass
        finally:
            stop.set()
            dripping.join()
    wait_until(lambda: threads() == 0, "its thread to end")


def test_a_reader_that_takes_nothing_holds_its_thread_no_longer_than_that(
    running: Served, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CONNECTION_S", 0.5)
    monkeypatch.setattr(http, "generate_latest", lambda _: bytes(64 << 20))
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", port_of(running)))
        token = token_file.read_text().strip()
        lazy.sendall(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        wait_until(lambda: threads() == 1, "its thread")
        wait_until(lambda: threads() == 0, "its thread to end")


def test_no_descriptor_stays_open(running: Served) -> None:
    get(port_of(running), "/livez")

    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_now()
    for _ in range(20):
        get(port_of(running), "/livez")
        socket.create_connection(("127.0.0.1", port_of(running))).close()
    wait_until(lambda: open_now() <= before, "descriptors to be closed")
