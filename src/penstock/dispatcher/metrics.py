"""What workers and clients said of themselves, as Prometheus reads it.

Counters begin anew with a runner's process and with a consumer's epoch, as counters may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.control.figures import ReadingClient, ServingRunner
from penstock.wire.figures import RunnerFigures, StageFigures
from penstock.wire.messages import Beat

_Gauge: TypeAlias = type[GaugeMetricFamily]
_Counter: TypeAlias = type[CounterMetricFamily]

_OF_RUNNERS: tuple[tuple[str, str, _Gauge | _Counter, Callable[[RunnerFigures], float]], ...] = (
    ("penstock_worker_streams", "Streams that run", GaugeMetricFamily, lambda f: f.streams),
    ("penstock_worker_resident_bytes", "Memory of the process", GaugeMetricFamily, lambda f: f.rss_bytes),
    ("penstock_worker_cpu_seconds", "Processor time of the process", CounterMetricFamily, lambda f: f.cpu_s),
    ("penstock_worker_refused_connections", "Connections not let in", CounterMetricFamily, lambda f: f.refused),
    ("penstock_stream_rounds", "Rounds given to readers", CounterMetricFamily, lambda f: f.rounds),
    ("penstock_stream_bytes", "Bytes given to readers", CounterMetricFamily, lambda f: f.nbytes),
    ("penstock_stream_runs", "Times a stream began, or began again", CounterMetricFamily, lambda f: f.runs),
    ("penstock_stream_busy_seconds", "Time streams spent making outputs", CounterMetricFamily, lambda f: f.busy_s),
    (
        "penstock_stream_credit_wait_seconds",
        "Time streams waited for readers to make room",
        CounterMetricFamily,
        lambda f: f.credit_wait_s,
    ),
)
_OF_STAGES: tuple[tuple[str, str, Callable[[StageFigures], float]], ...] = (
    ("penstock_stage_elements", "Elements a stage has made", lambda f: f.elements),
    ("penstock_stage_bytes", "Bytes of them, by a sample", lambda f: f.nbytes),
    ("penstock_stage_busy_seconds", "Time spent in a stage, over all threads", lambda f: f.busy_s),
    ("penstock_stage_cpu_seconds", "Processor time of a stage, over all threads", lambda f: f.cpu_s),
    ("penstock_stage_wait_seconds", "Time a stage's puller waited for work under way", lambda f: f.wait_s),
    ("penstock_stage_padded_values", "Values in arrays a stage padded, without the padding", lambda f: f.values),
    ("penstock_stage_padding_values", "Values it added as padding", lambda f: f.padding),
)
_OF_CLIENTS: tuple[tuple[str, str, _Gauge | _Counter, Callable[[Beat], float]], ...] = (
    ("penstock_client_batches", "Batches a consumer has taken", CounterMetricFamily, lambda b: b.batches),
    ("penstock_client_bytes", "Bytes a consumer has taken", CounterMetricFamily, lambda b: b.nbytes),
    ("penstock_client_wait_seconds", "Time its trainer waited", CounterMetricFamily, lambda b: b.wait_s),
    ("penstock_client_run_seconds", "Time its trainer did something else", CounterMetricFamily, lambda b: b.run_s),
    (
        "penstock_client_buffered_batches",
        "Batches received and not taken",
        GaugeMetricFamily,
        lambda b: b.buffered_elements,
    ),
    ("penstock_client_buffered_bytes", "Bytes of them", GaugeMetricFamily, lambda b: b.buffered_bytes),
)


def worker_metrics(workers: Iterable[ServingRunner]) -> Iterator[Metric]:
    workers = tuple(workers)
    for name, text, kind, value in _OF_RUNNERS:
        metric = kind(name, text, labels=["job", "worker"])
        for known in workers:
            metric.add_metric([known.job, known.worker], value(known.figures))
        yield metric
    for name, text, of_stage in _OF_STAGES:
        metric = CounterMetricFamily(name, text, labels=["job", "worker", "node", "stage"])
        for known in workers:
            for stage in known.figures.stages:
                metric.add_metric([known.job, known.worker, str(stage.node), stage.name], of_stage(stage))
        yield metric


def client_metrics(clients: Iterable[ReadingClient]) -> Iterator[Metric]:
    clients = tuple(clients)
    for name, text, kind, value in _OF_CLIENTS:
        metric = kind(name, text, labels=["job", "consumer", "replica", "trainer"])
        for known in clients:
            metric.add_metric([known.job, *map(str, known.slot)], value(known.beat))
        yield metric
