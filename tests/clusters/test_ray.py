"""Places as actors on three raylets of one host: one is killed in mid-epoch, others leave in peace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import penstock as ps
from penstock.provision.engines import PlaceCommand
from penstock.provision.ray_actors import RayEngine, RayOptions
from tests.clusters.conftest import Head
from tests.clusters.reading import read_while
from tests.waiting import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def lose_a_node(cluster: Cluster) -> None:
    cluster.remove_node(min(cluster.worker_nodes, key=lambda node: node.unique_id), allow_graceful=False)


def test_a_lost_node_and_a_released_place_lose_nothing(cluster: Cluster, head: Head) -> None:
    engine = RayEngine(
        PlaceCommand(dispatcher=head.address, keys="", drain_s=10),
        head.processes.keys.agent,
        RayOptions(namespace="test"),
    )
    engine.start(3)
    assert len(engine.names()) == 3

    def lose_node() -> None:
        lose_a_node(cluster)
        wait_until(lambda: len(engine.names()) == 2, "the lost node to be noticed")

    def release() -> None:
        engine.release([min(engine.names())])

    read_while(head.service_file, {20: lose_node, 120: release})
    assert len(engine.names()) == 1
    engine.close()
    assert engine.names() == frozenset()


def test_a_service_in_a_driver_replaces_what_a_lost_node_had(cluster: Cluster) -> None:
    with ps.RayService(workers=(0, 3)) as service:

        def replace_node() -> None:
            wait_until(lambda: len(service.workers()) == 3, "three workers")
            before = {line.worker for line in service.workers()}
            lose_a_node(cluster)
            cluster.add_node(num_cpus=1)
            wait_until(lambda: {line.worker for line in service.workers()} - before, "another worker", 90.0)

        read_while(service, {20: replace_node})


def test_a_driver_outside_a_cluster_is_told_so() -> None:
    with pytest.raises(ps.PenstockError, match=r"call ray.init\(\) first"):
        ps.RayService()


def test_the_example_with_ray_train_learns(tmp_path: Path) -> None:
    ray.shutdown()
    ran = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "after 32 steps of each rank" in ran.stdout
