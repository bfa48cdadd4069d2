"""Starting the processes of a training: ranks that meet, beside a service that deals to them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import penstock as ps

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 280


def run_ranks(module: str, folder: Path, ranks: int = 2, **environment: str) -> list[dict[str, Any]]:
    """Run `python -m module RANK FOLDER` for each rank, and return the JSON that each prints last."""
    with ps.LocalService(1) as service, socket.socket() as reserved:
        reserved.bind(("localhost", 0))
        port = reserved.getsockname()[1]
        reserved.close()
        told = {**os.environ, "MASTER_PORT": str(port), "SERVICE": str(service.service_file), **environment}
        told["TF_CPP_MIN_LOG_LEVEL"] = "2"
        started = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(folder)],
                cwd=ROOT,
                env=told,
                stdout=subprocess.PIPE,
                stderr=(folder / f"stderr-{rank}").open("w"),
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    for rank, process in enumerate(started):
        assert process.returncode == 0, (folder / f"stderr-{rank}").read_text()[-4000:]
    return [json.loads(text.splitlines()[-1]) for text in said]
