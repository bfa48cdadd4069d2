"""`penstock dispatcher`: a dispatcher in the foreground."""

from __future__ import annotations

import argparse

from penstock.cli.foreground import refuse_open_bind, say, service_credentials
from penstock.cli.main import UsageError
from penstock.cli.service_arguments import chosen_port, own_token
from penstock.dispatcher.main import DispatcherConfig, run


def run_dispatcher(options: argparse.Namespace) -> int:
    refuse_open_bind(options.bind, keys=options.keys)
    if not options.keys and not own_token() and not options.service_file:
        raise UsageError(
            "nobody could get in: give --service-file PATH, from which workers and trainers read the address and a "
            "token made for them, or set $PENSTOCK_TOKEN, or give --keys"
        )
    config = DispatcherConfig(
        credentials=service_credentials(options),
        journal=options.journal,
        bind=options.bind,
        port=chosen_port(options),
        port_range=options.port_range,
        advertise=options.advertise,
        http_port=options.http_port,
        http_bind=options.http_bind,
        http_token_file=options.http_token,
        service_file=options.service_file,
    )
    run(config, ready=lambda address: _introduce(address, options))
    return 0


def _introduce(address: str, options: argparse.Namespace) -> None:
    service = options.service_file or address
    keys = f" --keys {options.keys}" if options.keys else ""
    say(f"serving at {address}")
    say(f"workers:  penstock worker --dispatcher {service}{keys}")
    say(f"trainers: dataset.distribute({service!r})")
