"""Partitioned routing: consumers with streams of their own, and more workers than any of them should know."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.control.cluster import Cluster, spec

CONSUMERS, WORKERS, HOSTS = 64, 640, 16
MOST_CONNECTIONS = 60
LOST = WORKERS // 100


def connections(cluster: Cluster) -> tuple[Counter[int], Counter[str]]:
    """Return from how many processes each consumer reads, and how many consumers each process serves."""
    pairs = {(s.owner, s.runner) for s in cluster.view().streams if s.runner and s.owner is not None}
    return Counter(owner for owner, _ in pairs), Counter(runner for _, runner in pairs)


def test_nobody_holds_many_connections_however_many_workers_and_consumers_there_are() -> None:
    cluster = Cluster()
    by_host: defaultdict[int, list[str]] = defaultdict(list)
    for worker in range(WORKERS):
        by_host[worker % HOSTS].append(f"w{worker}")
    for host, workers in by_host.items():
        cluster.register(*workers, agent=f"A{host}", host=f"h{host}")
    described = spec(consumers=CONSUMERS, uneven="allow", split_counts=(100_000,))
    for consumer in range(CONSUMERS):
        cluster.open(consumer, spec=described)
    cluster.ready()
    consumers, processes = connections(cluster)
    assert len(consumers) == CONSUMERS and len(processes) == WORKERS
    assert max(consumers.values()) <= 40 and max(processes.values()) == 4
    assert max(consumers.values()) - min(consumers.values()) <= 1

    for stream in cluster.view().streams[: LOST * 4 : 4]:  # a hundredth of the processes, each with its streams
        cluster.die(stream.runner)
    after_loss, busier = connections(cluster)
    assert sum(after_loss.values()) >= sum(consumers.values()) - LOST * 4
    cluster.ready()
    consumers, processes = connections(cluster)
    assert max(*consumers.values(), *processes.values()) <= MOST_CONNECTIONS
    assert max(consumers.values()) - min(consumers.values()) <= 4
    assert all(s.runner for s in cluster.view().streams)
    assert max(busier.values()) <= MOST_CONNECTIONS
