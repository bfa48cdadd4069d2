"""9.6 MB batches (64 x 224 x 224 x 3 uint8) through one worker process, other bytes in each, every byte read.

Over loopback TCP, with our own listener's congestion control and with the system's, and through slabs of one host.
"""

from __future__ import annotations

from harness import Bench, main, ours, peer


def run(bench: Bench) -> None:
    unit = "MB/s"
    tf_service = peer("tf.data service", "peers.tf_service:batches")
    tcp = ours("ours.service:batches", path="tcp")
    system_tcp = ours("ours.service:batches", path="system tcp")
    bare, bare_reno = (
        peer(f"bare ZeroMQ, {name}", "peers.zmq_bare:batches", congestion=name) for name in ("system", "reno")
    )
    bench.compare("TCP, reno on our listener", tcp, [tf_service], unit=unit, target=3.0)
    bench.compare("TCP, the system's congestion control", system_tcp, [tf_service], unit=unit, target=2.5)
    bench.compare("TCP, reno on both", tcp, [bare_reno], unit=unit, target=0.85)
    bench.compare("TCP, the system's on both", system_tcp, [bare], unit=unit, target=0.85)
    bench.compare("slabs", ours("ours.service:batches", path="slabs"), [tf_service], unit=unit, target=10.0)


if __name__ == "__main__":
    main("transport", run, trees_by_case=True)
