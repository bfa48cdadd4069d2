"""What no other bench times of reading a job: turns, ranks, sharing, mid-sized outputs, operators after `distribute`.

Throughput is added up over the trainers, each a process; the p99 of `next()` is that of the slowest. There are no
peers: `--against CHECKOUT` compares with other sources of ours, and without it the other side is the same once more.
"""

from __future__ import annotations

from typing import Any

from harness import Bench, main, ours

RANKS = 2
SHARING_TRAINERS = 8


def ranks(order: str) -> list[dict[str, Any]]:
    return [{"ranks": RANKS, "rank": rank, "order": order} for rank in range(RANKS)]


def sharing(kind: str) -> list[dict[str, Any]]:
    together = {"trainers": SHARING_TRAINERS} if kind == "wait" else {}  # else who comes late misses the beginning
    return [{"sharing": kind, "trainer": f"trainer {number}"} | together for number in range(SHARING_TRAINERS)]


def run(bench: Bench) -> None:
    def case(name: str, output: str, trainers: list[dict[str, Any]], first: int, **arguments: Any) -> None:
        mine = ours("ours.protocol:read", output=output, trainers=trainers, first=first, **arguments)
        bench.compare(name, mine, [], unit="elements/s" if output == "element" else "batches/s")

    in_turns = {"order": "deterministic", "streams": 16}
    case("1 KB elements, deterministic, 16 streams", "element", [in_turns], 100_000)
    for order in ("relaxed", "deterministic"):
        case(f"1 KB elements, {RANKS} ranks, {order}", "element", ranks(order), 100_000)
    for kind in ("wait", "skip"):
        name = f"64 KB batches, {SHARING_TRAINERS} sharing trainers, {kind}"
        case(name, "batch", sharing(kind), 20_000)
    case("64 KB batches", "batch", [{}], 5_000)
    case("1 KB elements, map after distribute", "element", [{}], 100_000, after="map")
    operators = "map, unbatch, batch"
    case(f"64 KB batches, {operators} after distribute", "batch", [{}], 5_000, after=operators)


if __name__ == "__main__":
    main("protocol", run, trees_by_case=True)
