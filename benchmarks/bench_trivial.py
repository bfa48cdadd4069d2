"""A function that costs nothing, so that what is measured is the loader: ints, and dicts of three leaves, batch 256."""

from __future__ import annotations

from harness import Bench, main, ours, peer

CASES = {"ints": ("add_one", 8.0), "dicts": ("three_leaves", 3.0)}


def run(bench: Bench) -> None:
    for case, (task, target) in CASES.items():
        mine = ours("ours.trivial:trivial", task=task)
        peers = [
            peer("DataLoader, 0 processes", "peers.torch_loader:trivial", task=task, processes=0),
            peer("DataLoader, 2 processes", "peers.torch_loader:trivial", task=task, processes=2),
            peer("Grain, in process", "peers.grain_loader:trivial", task=task, processes=0),
            peer("Grain, 2 processes", "peers.grain_loader:trivial", task=task, processes=2),
            peer("Ray Data", "peers.ray_data:trivial", task=task),
        ]
        bench.compare(case, mine, peers, unit="elements/s", target=target)
        # Not a peer and without a target: how far ours is from calling the function in a loop.
        bench.compare(case, mine, [ours("ours.trivial:bare_loop", name="bare loop", task=task)], unit="elements/s")


if __name__ == "__main__":
    main("trivial", run, trees_by_case=True)
