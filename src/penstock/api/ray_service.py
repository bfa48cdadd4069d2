"""`RayService`: a dispatcher in a Ray driver, and workers as actors of its cluster."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from penstock.api.services import OwnedService
from penstock.core.checks import check_whole
from penstock.core.errors import PenstockError
from penstock.processes.service_processes import ServiceOptions, ServiceProcesses
from penstock.provision.bringing import Bringer, WorkerOffer
from penstock.provision.engines import PlaceCommand
from penstock.provision.local import worker_range
from penstock.provision.ray_actors import RayEngine, RayOptions, imported_ray
from penstock.wire.addresses import Listening

_log = logging.getLogger("penstock")


class RayService(OwnedService):
    """A dispatcher beside this driver, and worker processes on the nodes of its Ray cluster, one an actor.

    Ray places the actors and, with its autoscaler, brings nodes for them; how many there are follows from what jobs
    want. The cluster is the one that `ray.init` connected this process to.
    """

    def __init__(
        self,
        workers: int | tuple[int, int] = (1, 8),
        *,
        cpus: int = 1,
        resources: Mapping[str, float] | None = None,
        journal: str | os.PathLike[str] | None = None,
        price_per_h: float = 0.0,
    ) -> None:
        """`workers` is their number, or (least, most); `cpus` and `resources` are what each asks of Ray.

        With `journal`, a folder, jobs outlive the service.
        """
        ray = imported_ray()
        if not ray.is_initialized():
            raise PenstockError("this process is in no Ray cluster yet: call ray.init() first")
        check_whole("cpus", cpus, 1)
        least, most = worker_range(workers)
        host = ray.util.get_node_ip_address()
        processes = ServiceProcesses(
            ServiceOptions(
                workers=0,
                listening=Listening(bind="0.0.0.0", advertise=host),
                journal=None if journal is None else Path(journal),
            )
        )
        engine = RayEngine(
            PlaceCommand(dispatcher=processes.address, keys="", threads=cpus, bind="0.0.0.0"),
            processes.keys.agent,
            RayOptions(namespace=f"penstock-{secrets.token_hex(4)}", cpus=cpus, resources=dict(resources or {})),
        )
        offer = WorkerOffer(provisioner=f"ray-{processes.address}", least=least, most=most, price_per_h=price_per_h)
        super().__init__(processes, Bringer(processes.provisioning, engine, offer, _log.info))
