"""A process that serves has as many descriptors as its user may have."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

from penstock.dispatcher.main import DispatcherConfig
from penstock.wire.descriptor_limit import ENOUGH
from tests.dispatcher.serving import KNOWN, ended, started
from tests.keys import SERVER

LOWER_THE_LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(7)[1]))"


def test_a_dispatcher_raises_its_limit_at_start() -> None:
    process, _ = started(DispatcherConfig(server=SERVER, known=KNOWN), before=LOWER_THE_LIMIT)
    try:
        found = next(
            line for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines() if "open files" in line
        ).split()
        assert int(found[3]) == min(ENOUGH, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    finally:
        os.kill(process.pid, signal.SIGTERM)
        ended(process)
