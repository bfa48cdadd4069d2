"""`/livez`, `/readyz` and `/metrics` on a port of their own, in a thread of their own.

It only reads what the service published: it asks nothing of the loop, and a loop that hangs shows as not alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.core.errors import CannotListenError
from penstock.dispatcher.metrics import client_metrics, worker_metrics

if TYPE_CHECKING:
    from penstock.dispatcher.service import Service

HANGS_AFTER_S = 30.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
IDLE_TIMEOUT_S = 10.0

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


class HttpServer:
    """Serves until closed; `port` is the one it got."""

    def __init__(
        self, service: Service, bind: str, port: int, *, refused: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        service.detailed = True
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(service, refused))
        handler = type("Handler", (_Handler,), {"service": service, "registry": registry, "clock": staticmethod(clock)})
        try:
            self._server = ThreadingHTTPServer((bind, port), handler)
        except OSError as error:
            raise CannotListenError(f"http://{bind}:{port}", error.strerror or str(error)) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="penstock-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5.0)
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    service: Service
    registry: CollectorRegistry
    clock: Callable[[], float] = time.monotonic
    timeout = IDLE_TIMEOUT_S
    server_version = "penstock"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        silent_s = self.clock() - self.service.turned_at
        alive = silent_s < HANGS_AFTER_S
        if path == "/metrics":
            self._reply(200, generate_latest(self.registry), CONTENT_TYPE)
        elif path == "/livez":
            text = "alive" if alive else f"the loop has not come around for {silent_s:.0f} s"
            self._reply(200 if alive else 503, text.encode())
        elif path == "/readyz":
            broken = self.service.statistics.broken
            text = "ready" if alive and not broken else broken or f"the loop has not come around for {silent_s:.0f} s"
            self._reply(200 if alive and not broken else 503, text.encode())
        else:
            self._reply(404, b"there are /livez, /readyz and /metrics")

    def _reply(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass  # probes come every few seconds


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
