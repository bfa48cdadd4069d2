"""What workers and trainers say of themselves reaches whoever asks."""

from __future__ import annotations

import socket
import time

import penstock as ps
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.wire.messages import ListWorkers, Workers
from tests.security.web import get

DEADLINE_S = 60.0


def slowly(x: int) -> int:
    time.sleep(0.002)
    return x


def test_a_job_that_is_read_shows_in_the_metrics_and_in_the_list_of_workers(tmp_path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    token = tmp_path / "token"
    options = ServiceOptions(workers=1, http_port=port, http_token_file=str(token))
    processes = ServiceProcesses(options)
    try:
        processes.wait_ready(DEADLINE_S)
        file = tmp_path / "service.json"
        processes.service_file().write(file)
        with (
            ps.range(10**9)
            .map(slowly)
            .batch(8)
            .distribute(str(file), job="shown", limits=ps.Limits(timeout_s=DEADLINE_S)) as loader
        ):
            deadline = time.monotonic() + DEADLINE_S
            wanted = (
                "penstock_stream_rounds_total{",
                "penstock_stage_busy_seconds_total{",
                "penstock_client_batches_t",
            )
            text, rate = "", 0.0
            for _ in loader:
                text = get(port, "/metrics", token=token.read_text().strip())[1]
                listed = processes.control().ask(ListWorkers(), timeout_s=DEADLINE_S, what="workers")
                assert isinstance(listed, Workers)
                rate = listed.workers[0].rounds_per_s
                if rate > 0 and listed.workers[0].rss_bytes > 0 and all(f"\n{name}" in text for name in wanted):
                    break
                assert time.monotonic() < deadline, text
        (worker,) = listed.workers
        stages = [line for line in text.splitlines() if line.startswith("penstock_stage_elements_total{")]
        assert all('job="shown",node=' in line and f'worker="{worker.worker}"' in line for line in stages)
        assert any("slowly" in line for line in stages), stages
    finally:
        processes.close()
