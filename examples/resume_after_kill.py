"""Kill a training in mid-epoch with SIGKILL, start it again, and see every element exactly once.

python examples/resume_after_kill.py
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import penstock as ps

ELEMENTS, BATCH, DIES_AT = 1000, 20, 17


def jitter(x, rng):
    return {"x": x, "noise": rng.normal()}


def train(folder: Path, *, dies_at: int | None) -> None:
    checkpoint, log = folder / "checkpoint.json", folder / "seen.jsonl"
    with ps.range(ELEMENTS).shuffle(seed=3).map(jitter).batch(BATCH).iterator() as iterator:
        step = 0
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            step = saved["step"]
            iterator.load_state_dict(saved["data"])
        for batch in iterator:
            step += 1
            with log.open("a") as file:  # the training step
                file.write(
                    json.dumps({"step": step, "x": batch["x"].tolist(), "noise": batch["noise"].tolist()}) + "\n"
                )
            new = checkpoint.with_suffix(".new")
            new.write_text(json.dumps({"step": step, "data": iterator.state_dict()}))
            new.rename(checkpoint)  # a checkpoint is whole or not there
            if step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), dies_at=int(sys.argv[2]) if len(sys.argv) > 2 else None)
        return
    folder, undisturbed = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    killed = subprocess.run([sys.executable, __file__, str(folder), str(DIES_AT)])
    print(
        f"killed by signal {-killed.returncode} after step {DIES_AT}; "
        f"its checkpoint has {(folder / 'checkpoint.json').stat().st_size} bytes"
    )
    subprocess.run([sys.executable, __file__, str(folder)], check=True)
    subprocess.run([sys.executable, __file__, str(undisturbed)], check=True)

    seen = (folder / "seen.jsonl").read_text()
    elements = [x for line in seen.splitlines() for x in json.loads(line)["x"]]
    assert sorted(elements) == list(range(ELEMENTS))
    assert seen == (undisturbed / "seen.jsonl").read_text()
    print(f"{len(elements)} elements seen once each, in the order and with the noise of a run that was not killed")


if __name__ == "__main__":
    main()
