"""`/livez`, `/readyz` and `/metrics` on a port of their own, in threads of their own.

It only reads what the service published: it asks nothing of the loop, and a loop that hangs shows as not alive.

Probes are answered to anybody who reaches the port; metrics, which name jobs and trainers, only to who shows the token
(`Authorization: Bearer`). A browser that was led here by a name of somebody else's (DNS rebinding) is refused by its
Host header. There are so many threads and no more, a connection carries one request and has a few seconds for it, and
when all are taken the oldest makes room: somebody who holds connections open cannot keep a probe from its answer.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.core.errors import CannotListenError, InvalidArgumentError
from penstock.core.private_files import make_private, open_private
from penstock.dispatcher.metrics import client_metrics, worker_metrics
from penstock.dispatcher.room import JournalRoom

if TYPE_CHECKING:
    from penstock.dispatcher.service import Service

HANGS_AFTER_S = 30.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CONNECTION_S = 5.0  # for a request and its answer, however slowly the other side reads
MAX_CONNECTIONS = 16
MAKE_ROOM_S = 0.5
LOOK_S = 0.2

_GAUGES = {
    "position": "Events journaled, ever",
    "generation": "How often the journal was taken up",
    "jobs": "Jobs",
    "clients": "Consumers that read",
    "agents": "Agents",
    "workers": "Workers",
    "runners": "Processes that run user code",
    "streams": "Streams of present attempts",
    "blobs": "Graphs and split lists held",
}
_COUNTERS = {
    "turns": "Turns of the loop that served requests",
    "commits": "Group commits",
    "events": "Events committed by this process",
    "commit_s": "Seconds spent in commits",
    "write_failures": "Commits that failed",
    "tails_lost": "Meetings with peers that had seen more than the journal has",
    "unreachable": "Messages to peers that were gone",
    "garbage": "Messages that were no request, or of a version not served",
    "failures": "Requests and ticks that made the dispatcher fail",
}


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen, and to whom."""

    bind: str
    port: int
    token_file: str | None
    names: tuple[str, ...] = ()
    """What this host is called besides what it calls itself."""


class HttpServer:
    """Serves until closed; `port` is the one it got."""

    def __init__(
        self,
        options: HttpOptions,
        service: Service,
        room: JournalRoom,
        *,
        refused: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        service.detailed = True
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(service, refused))
        if options.token_file is not None:
            _make_token(Path(options.token_file))
        parts = {
            "service": service,
            "registry": registry,
            "room": room,
            "options": options,
            "clock": staticmethod(clock),
        }
        try:
            self._server = _BoundedServer((options.bind, options.port), type("Handler", (_Handler,), parts))
        except OSError as error:
            where = f"http://{options.bind}:{options.port}"
            raise CannotListenError(where, error.strerror or str(error)) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_S,), name="penstock-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5.0)
        self._server.server_close()


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._began: dict[Any, float] = {}
        """When each open connection was accepted, oldest first."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self._cut_off(older_than_s=-1.0, most=1)
            if not self._places.acquire(timeout=MAKE_ROOM_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._began[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def _release(self, request: Any) -> None:
        with self._lock:
            self._began.pop(request, None)
        self._places.release()

    def service_actions(self) -> None:
        self._cut_off(older_than_s=CONNECTION_S, most=MAX_CONNECTIONS)

    def _cut_off(self, *, older_than_s: float, most: int) -> None:
        """End the oldest connections; their threads notice, and leave."""
        now = time.monotonic()
        with self._lock:
            old = [request for request, began in self._began.items() if now - began > older_than_s][:most]
            for request in old:
                del self._began[request]
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other side was first

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # who hangs up, or is cut off, is nothing to write down


def _make_token(path: Path) -> None:
    """Make a token unless there is one; whoever scrapes reads it from the same file."""
    make_private(path)
    try:
        with open_private(path, "x") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidArgumentError(f"the token for /metrics cannot be made at {path}: {error.strerror}") from None
    _read_token(path)


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the token for /metrics cannot be read from {path}: {error}") from None
    if len(token) < 16:
        raise InvalidArgumentError(
            f"the token in {path} has {len(token)} characters: too few; remove the file, or use 16"
        )
    return token


class _Handler(BaseHTTPRequestHandler):
    service: Service
    registry: CollectorRegistry
    room: JournalRoom
    options: HttpOptions
    clock: Callable[[], float] = time.monotonic
    timeout = CONNECTION_S
    server_version = "penstock"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not _is_own_name(self.headers.get("Host", ""), (self.options.bind, *self.options.names)):
            self._reply(421, b"this host has another name: use its address")
            return
        silent_s = self.clock() - self.service.turned_at
        hangs = "" if silent_s < HANGS_AFTER_S else f"the loop has not come around for {silent_s:.0f} s"
        if path == "/metrics":
            self._reply_metrics()
        elif path == "/livez":
            self._reply(503 if hangs else 200, (hangs or "alive").encode())
        elif path == "/readyz":
            lacking = hangs or self.service.statistics.broken or self.room.lacking()
            self._reply(503 if lacking else 200, (lacking or "ready").encode())
        else:
            self._reply(404, b"there are /livez, /readyz and /metrics")

    def _reply_metrics(self) -> None:
        if self.options.token_file is None:
            self._reply(403, b"metrics are for who shows a token: start the dispatcher with --http-token FILE")
            return
        kind, _, shown = self.headers.get("Authorization", "").partition(" ")
        try:
            # Read each time: whoever replaces the file has replaced the token.
            expected = _read_token(Path(self.options.token_file))
        except InvalidArgumentError as error:
            self._reply(503, str(error).encode())
            return
        if kind.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), expected.encode()):
            self._reply(401, b"metrics are for who shows the token of --http-token: Authorization: Bearer TOKEN")
            return
        self._reply(200, generate_latest(self.registry), CONTENT_TYPE)

    def _reply(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", 'Bearer realm="penstock"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass  # probes come every few seconds


def _is_own_name(host: str, names: tuple[str, ...]) -> bool:
    """Return whether a Host header names this host: by an address, which no foreign name server can lead here, or name.

    >>> [_is_own_name(host, ("head:1",)) for host in ("10.0.0.7:8080", "[::1]", "localhost", "head:80")]
    [True, True, True, True]
    >>> [_is_own_name(host, ("head:1",)) for host in ("evil.example", "")]
    [False, False]
    """
    name = _without_port(host)
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        own = {_without_port(known) for known in ("localhost", socket.gethostname(), *names)}
        return bool(name) and name in own


def _without_port(host: str) -> str:
    return (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).lower().rstrip(".")


class _Collector:
    def __init__(self, service: Service, refused: Callable[[], int]) -> None:
        self._service, self._refused = service, refused

    def collect(self) -> Iterator[Metric]:
        statistics = self._service.statistics
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"penstock_dispatcher_{name}", text, value=getattr(statistics, name))
        for name, text in _COUNTERS.items():
            full = f"penstock_dispatcher_{name.replace('commit_s', 'commit_seconds')}"
            yield CounterMetricFamily(full, text, value=getattr(statistics, name))
        yield GaugeMetricFamily(
            "penstock_dispatcher_journal_writable",
            "1 if the journal can be written",
            value=float(not statistics.broken),
        )
        yield CounterMetricFamily(
            "penstock_dispatcher_refused_connections", "Connections not let in", value=self._refused()
        )
        requests = CounterMetricFamily("penstock_dispatcher_requests", "Requests served", labels=["kind"])
        for kind, count in statistics.requests.items():
            requests.add_metric([kind], count)
        yield requests
        yield from worker_metrics(statistics.workers_said)
        yield from client_metrics(statistics.clients_said)
