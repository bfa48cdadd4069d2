"""`penstock dispatcher`: a dispatcher in the foreground."""

from __future__ import annotations

import argparse
import contextlib

from penstock.cli.foreground import listening_of, registry_of, say, scaling_rules, service_keys
from penstock.cli.main import UsageError
from penstock.dispatcher.main import DispatcherConfig, run
from penstock.processes.service_folder import ServiceFolder
from penstock.wire.addresses import Listening
from penstock.wire.credentials import ServiceKeys


def run_dispatcher(options: argparse.Namespace) -> int:
    listening = listening_of(options)
    if not options.keys and not options.service_file:
        raise UsageError(
            "nobody could get in: give --service-file PATH, from which workers and trainers of this host read where it "
            "is and a key made for them; or give --keys, and --bind to be reached by TCP"
        )
    keys = service_keys(options)
    with contextlib.ExitStack() as undo:
        if listening is None:
            folder = ServiceFolder(options.service_file or options.journal)
            undo.callback(folder.close)
            undo.callback(folder.remove)
            listening = folder.listening()
        config = DispatcherConfig(
            server=keys.server,
            known=keys.known,
            registry=registry_of(options),
            audit_log=options.audit_log,
            journal=options.journal,
            listening=listening,
            http_port=options.http_port,
            http_bind=options.http_bind,
            http_token_file=options.http_token,
            scaling=scaling_rules(options),
        )
        run(config, ready=lambda address: _introduce(address, options, keys, listening))
    return 0


def _introduce(address: str, options: argparse.Namespace, keys: ServiceKeys, listening: Listening) -> None:
    if options.service_file:
        keys.file(address, all_roles=listening.unix).write(options.service_file)
    service = options.service_file or address
    say(f"serving at {address}")
    say(f"workers:  penstock worker --dispatcher {service}{'' if listening.unix else ' --keys AGENT_KEY'}")
    say(f"trainers: dataset.distribute({service!r})")
