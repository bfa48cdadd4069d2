"""`penstock provision` and `penstock serve --on`: workers on Slurm, Ray or Kubernetes, as many as are wanted."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shlex

from penstock.cli.foreground import StopSignals, say
from penstock.cli.main import UsageError
from penstock.provision.bringing import Bringer, WorkerOffer
from penstock.provision.engines import Engine, PlaceCommand
from penstock.provision.local import worker_range
from penstock.wire.addresses import is_unix
from penstock.wire.control import ControlClient
from penstock.wire.credentials import KEYS_VARIABLE, Credentials, ServiceFile, find_service


def run_provision(options: argparse.Namespace) -> int:
    """Bring workers for a service that runs elsewhere, until Ctrl-C or SIGTERM."""
    service = _service(options)
    least, most = worker_range(options.workers)
    engine = engine_of(options, options.engine, service.address, options.agent_keys)
    offer = offer_of(options, engine, service.address, least, most)
    with (
        StopSignals() as signals,
        contextlib.closing(ControlClient(service.address, service.credentials, name="provisioner")) as control,
        contextlib.closing(Bringer(lambda: control, engine, offer, say)),
    ):
        say(f"bringing {least} to {most} workers on {engine.kind} for {service.address}")
        while not signals.count:
            signals.wait_for_one()
        say("leaving: places are released")
    return 0


def offer_of(options: argparse.Namespace, engine: Engine, address: str, least: int, most: int) -> WorkerOffer:
    return WorkerOffer(
        provisioner=options.id or f"{engine.kind}-{address}",
        least=least,
        most=most,
        price_per_h=options.price_per_hour,
        tags=options.tags,
    )


def engine_of(options: argparse.Namespace, name: str, dispatcher: str, agent_keys: str | None) -> Engine:
    """Return the engine of that name. `agent_keys` is the file with the key that its workers show."""
    if is_unix(dispatcher):
        raise UsageError(
            f"the service at {dispatcher} is reached on its own host only; have it listen by TCP (--bind, --keys)"
        )
    if name == "kubernetes":
        from penstock.provision.kubernetes import KubernetesEngine, KubernetesOptions

        return KubernetesEngine(
            KubernetesOptions(
                deployment=options.deployment,
                namespace=options.namespace,
                pods=options.pods or f"app={options.deployment}",
                kubeconfig=options.kubeconfig,
            )
        )
    if not agent_keys:
        raise UsageError("workers need the key of an agent: give --agent-keys agent.json, as `penstock keys` writes it")
    keys = os.path.abspath(agent_keys)
    command = PlaceCommand(
        dispatcher=dispatcher,
        keys=keys,
        threads=options.cpus,
        drain_s=options.drain_seconds,
        tags=options.tags,
    )
    group = f"penstock-{hashlib.sha256(dispatcher.encode()).hexdigest()[:8]}"
    if name == "slurm":
        from penstock.provision.slurm import SlurmEngine, SlurmOptions

        return SlurmEngine(
            command,
            SlurmOptions(
                service=group,
                cpus=options.cpus,
                time_limit_s=options.time_limit_seconds,
                output=options.log,
                extra=tuple(shlex.split(options.sbatch)),
            ),
        )
    from penstock.provision.ray_actors import RayEngine, RayOptions, imported_ray

    imported_ray().init(address=options.ray_address, ignore_reinit_error=True)
    return RayEngine(command, Credentials.read(keys), RayOptions(namespace=group, cpus=options.cpus))


def _service(options: argparse.Namespace) -> ServiceFile:
    path = options.keys or os.environ.get(KEYS_VARIABLE)
    if path and options.service and "://" in options.service:
        service = ServiceFile(address=options.service, credentials=Credentials.read(path))
    else:
        service = find_service(options.service, "provisioner")
        if path:
            service = ServiceFile(address=service.address, credentials=Credentials.read(path))
    if service.credentials.role != "provisioner":
        raise UsageError(
            "who brings workers needs a key of that role: `penstock keys make DIR NAME --role provisioner`, and "
            "--keys DIR/NAME.json"
        )
    return service
