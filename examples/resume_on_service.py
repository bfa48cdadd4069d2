"""Two ranks read one job of a service and are killed in mid-epoch; three ranks go on, and every element is seen once.

python examples/resume_on_service.py
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import penstock as ps

ELEMENTS, BATCH, DIES_AT = 2400, 10, 30


def train(before: Path, folder: Path, rank: int, ranks: int, dies_at: int) -> None:
    """One rank. It finds the service by $PENSTOCK_SERVICE, and goes on from what all ranks left in `before`, if any."""
    dataset = ps.range(ELEMENTS).shuffle(seed=3).batch(BATCH)
    with dataset.distribute(job=f"run-of-{ranks}", ranks=ps.Ranks(ranks, rank), order="deterministic") as loader:
        states = [json.loads(path.read_text()) for path in sorted(before.glob("state-*.json"))]
        if states:
            loader.load_state_dict(states)
        with (folder / f"seen-{rank}.jsonl").open("w") as seen:
            for step, batch in enumerate(loader, 1):
                seen.write(json.dumps(batch.tolist()) + "\n")  # the training step
                if step == dies_at:
                    seen.flush()
                    (folder / f"state-{rank}.json").write_text(json.dumps(loader.state_dict()))
                    os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(service: ps.LocalService, before: Path, folder: Path, ranks: int, dies_at: int = 0) -> list[int]:
    environment = {**os.environ, "PENSTOCK_SERVICE": str(service.service_file)}
    command = [sys.executable, __file__, str(before), str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(dies_at)], env=environment) for rank in range(ranks)
    ]
    return [process.wait() for process in processes]


def main() -> None:
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
        return
    nothing, first, second = (Path(tempfile.mkdtemp()) for _ in range(3))
    with ps.LocalService(workers=2) as service:  # or `penstock serve`, or a cluster: the ranks do not know
        codes = run_ranks(service, nothing, first, 2, DIES_AT)
    sizes = [path.stat().st_size for path in first.glob("state-*.json")]
    print(f"2 ranks ended with {codes} after {DIES_AT} steps; their states have {sizes} bytes")

    with ps.LocalService(workers=1) as service:  # another service, which has never heard of the job
        assert run_ranks(service, first, second, 3) == [0, 0, 0]
    steps = [len(path.read_text().splitlines()) for path in second.glob("seen-*.jsonl")]

    logs = [*first.glob("seen-*.jsonl"), *second.glob("seen-*.jsonl")]
    seen = [i for path in logs for line in path.read_text().splitlines() for i in json.loads(line)]
    assert sorted(seen) == list(range(ELEMENTS))
    print(f"3 ranks went on for {steps} steps; {len(seen)} elements seen once each")


if __name__ == "__main__":
    main()
