"""9.6 MB batches (64 x 224 x 224 x 3 uint8) through one worker process, other bytes in each, every byte read.

Through the Unix sockets and the slabs of one host, and over loopback TCP, which is encrypted.
"""

from __future__ import annotations

from harness import Bench, main, ours, peer


def run(bench: Bench) -> None:
    unit = "MB/s"
    tf_service = peer("tf.data service", "peers.tf_service:batches")
    sockets = ours("ours.service:batches", path="sockets")
    bare = peer("bare ZeroMQ, TCP with reno", "peers.zmq_bare:batches", congestion="reno")
    bench.compare("sockets", sockets, [tf_service], unit=unit, target=3.0)
    bench.compare("sockets, against bare ZeroMQ", sockets, [bare], unit=unit, target=0.85)
    bench.compare("encrypted TCP", ours("ours.service:batches", path="tcp"), [tf_service], unit=unit)
    bench.compare("slabs", ours("ours.service:batches", path="slabs"), [tf_service], unit=unit, target=10.0)


if __name__ == "__main__":
    main("transport", run, trees_by_case=True)
