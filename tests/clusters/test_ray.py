"""Places as actors on three raylets of one host: one is killed in mid-epoch, others leave in peace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from penstock.provision.engines import PlaceCommand
from penstock.provision.ray_actors import RayEngine, RayOptions
from tests.clusters.conftest import Head
from tests.clusters.reading import read_while
from tests.waiting import wait_until


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_lost_node_and_a_released_place_lose_nothing(cluster: Cluster, head: Head) -> None:
    engine = RayEngine(
        PlaceCommand(dispatcher=head.address, keys="", drain_s=10),
        head.processes.keys.agent,
        RayOptions(namespace="test"),
    )
    engine.start(3)
    assert len(engine.names()) == 3

    def lose_node() -> None:
        cluster.remove_node(sorted(cluster.worker_nodes, key=lambda node: node.unique_id)[0], allow_graceful=False)
        wait_until(lambda: len(engine.names()) == 2, "the lost node to be noticed")
        cluster.add_node(num_cpus=1)
        engine.start(1)

    def release() -> None:
        engine.release([min(engine.names())])

    read_while(head.service_file, {20: lose_node, 120: release})
    assert len(engine.names()) == 2
    engine.close()
    assert engine.names() == frozenset()
