"""`penstock serve`: a dispatcher and workers on this host."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from penstock.cli.foreground import (
    StopSignals,
    listening_of,
    registry_of,
    sandbox_of,
    say,
    scaling_rules,
    service_keys,
)
from penstock.cli.provision import engine_of, offer_of
from penstock.processes.nursery_link import Died, describe_exit
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.provision.bringing import Bringer
from penstock.provision.local import bring_local_workers, worker_range
from penstock.wire.addresses import Listening

ANY_HOST = "0.0.0.0"
LOOK_AGAIN_S = 1.0
PAUSE_S = 0.05


def run_serve(options: argparse.Namespace) -> int:
    listening, keys = listening_of(options), service_keys(options)
    least, most = worker_range(options.workers)
    if options.on and listening is None:
        listening = Listening(bind=ANY_HOST, advertise=options.advertise)  # with the keys that the service file has
    with StopSignals() as signals:
        processes = ServiceProcesses(
            ServiceOptions(
                workers=0 if options.on else least,
                most_workers=0 if options.on else most,
                keys=keys,
                listening=listening,
                sandbox=sandbox_of(options, listening or Listening(folder="of its own")),
                named_after=options.service_file or options.journal,
                journal=Path(options.journal) if options.journal else None,
                http_port=options.http_port,
                http_bind=options.http_bind,
                http_token_file=options.http_token,
                registry=registry_of(options),
                audit_log=options.audit_log,
                threads=options.threads,
                memory_bytes=options.memory_bytes,
                tags=options.tags,
                scaling=scaling_rules(options),
            )
        )
        bringer = None
        file = Path(options.service_file or processes.scratch / "service.json").absolute()
        try:
            _wait_ready(processes, signals)
            if not signals.count:
                processes.service_file().write(file)
                bringer = _bringer(options, processes, least, most, file)
                _introduce(processes.address, least, most, file)
            while not signals.count:
                signals.wait(processes.fileno(), LOOK_AGAIN_S)
                events = processes.take_events()
                for event in events:
                    if isinstance(event, Died):
                        say(f"the {event.id} {describe_exit(event.code, event.failure)}; it is started again")
                if not events:
                    time.sleep(PAUSE_S)  # the nursery may be what was killed: another one is on its way
        finally:
            if bringer is not None:
                bringer.close()
            processes.close()
            file.unlink(missing_ok=True)
    say("ended")
    return 0


def _bringer(
    options: argparse.Namespace, processes: ServiceProcesses, least: int, most: int, file: Path
) -> Bringer | None:
    """Return who brings workers; None: there are as many as there will be."""
    if not options.on:
        return bring_local_workers(processes, least, most, options.tags) if least < most else None
    agent_keys = file.with_name(f"{file.stem}.agent.json")  # workers read it there: a folder that their hosts share
    processes.keys.agent.write(agent_keys)
    engine = engine_of(options, options.on, processes.address, str(agent_keys))
    return Bringer(processes.provisioning, engine, offer_of(options, engine, processes.address, least, most), say)


def _wait_ready(processes: ServiceProcesses, signals: StopSignals) -> None:
    while not signals.count and not processes.ready():
        signals.wait(processes.fileno(), LOOK_AGAIN_S)
        processes.take_events()


def _introduce(address: str, least: int, most: int, file: Path) -> None:
    count = str(most) if least == most else f"{least} to {most}"
    say(f"serving at {address} with {count} worker{'' if most == 1 else 's'}")
    say(f"service file: {file}")
    say("in a trainer on this host:")
    say(f"  export PENSTOCK_SERVICE={shlex.quote(str(file))}    and dataset.distribute(), or")
    say(f"  dataset.distribute({str(file)!r})")
