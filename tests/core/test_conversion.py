"""Types are learned while modules are imported: msgspec crashes where two threads use one for the first time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import penstock

READ_IN_EIGHT_THREADS = """
import sys, threading
sys.setswitchinterval(1e-6)
from penstock.core.errors import StateMismatchError
from penstock.stream.checkpoint import ConsumerState
gate, refused = threading.Barrier(8), []
def read():
    gate.wait()
    try:
        ConsumerState.read({"sampler": 1, "progress": {"x": 1}, "consumer": 1})
    except StateMismatchError as error:
        refused.append(error)
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(refused))
"""

KNOWN = {
    "control/metric_store.py": "the dispatcher's own thread, and a kind that the caller names",
    "api/offload_memory.py": "the trainer's own thread, and a kind that the caller names",
    "processes/forked_child.py": "a child that has one thread yet",
    "wire/credentials.py": "files of keys, before there are threads",
    "core/conversion.py": "the one place that knows when",
    "cli/cache.py": "a command that has one thread",
}


def test_states_are_read_by_eight_threads_at_once() -> None:
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", READ_IN_EIGHT_THREADS], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, "8"), done.stderr


def test_no_type_is_learned_where_several_threads_may_come() -> None:
    root = Path(penstock.__file__).parent
    learning = re.compile(r"msgspec\.convert\(|\.decode\([^()]*type=(?!list\[Any\])")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if learning.search(path.read_text())}
    assert found == set(KNOWN)
