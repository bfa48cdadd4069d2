"""Pods of a Deployment against an API server with state, whose pods are real processes; and the manifests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.provision.engines import EngineError, PlaceCommand
from penstock.provision.kubernetes import KubernetesEngine, KubernetesOptions
from tests.clusters.conftest import Head
from tests.clusters.kubernetes_api import KubernetesApi
from tests.clusters.reading import read_while
from tests.waiting import wait_until

MANIFESTS = sorted(Path(__file__, "../../../deploy/kubernetes").resolve().glob("*.yaml"))
OPTIONS = KubernetesOptions()
OPERATORS = {"ray.io"}
"""Groups whose kinds an operator adds to a cluster: Kubernetes' own schema does not have them."""


@pytest.fixture
def api(head: Head, tmp_path: Path) -> Iterator[KubernetesApi]:
    command = PlaceCommand(dispatcher=head.address, keys=head.agent_key, drain_s=10)
    api = KubernetesApi(OPTIONS.deployment, OPTIONS.pods, command.arguments)
    api.write_kubeconfig(tmp_path / "kubeconfig")
    yield api
    api.close()


def engine_of(tmp_path: Path) -> KubernetesEngine:
    return KubernetesEngine(KubernetesOptions(kubeconfig=str(tmp_path / "kubeconfig")))


def test_pods_come_and_those_that_are_released_go(api: KubernetesApi, head: Head, tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.start(3)
    leaving: list[str] = []

    def release() -> None:
        leaving.extend(sorted(engine.names())[1:2])
        engine.release(leaving)

    read_while(head.service_file, {20: release})
    wait_until(lambda: engine.names() == frozenset(api.pods) and leaving[0] not in api.pods, "the pod to end")
    assert api.replicas == 2 and len(engine.names()) == 2


def test_a_pod_that_is_lost_is_replaced_and_loses_nothing(api: KubernetesApi, head: Head, tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.start(2)

    def kill() -> None:
        process = next(iter(api.pods.values())).process
        process.kill()
        process.wait()  # a process that is still ending counts as a pod
        engine.names()

    read_while(head.service_file, {20: kill})
    assert api.made == 3 and len(engine.names()) == 2


def test_the_role_allows_what_is_used_and_no_more(api: KubernetesApi, head: Head, tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.start(1)
    engine.release(engine.names())
    documents = [each for file in MANIFESTS for each in yaml.safe_load_all(file.read_text())]
    (role,) = [each for each in documents if each["kind"] == "Role"]
    allowed = {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert set(api.asked) == allowed


def test_an_api_server_that_is_away_is_a_sentence(tmp_path: Path, api: KubernetesApi) -> None:
    engine = engine_of(tmp_path)
    api.close()
    with pytest.raises(EngineError, match=r"could not set the scale|could not read the scale"):
        engine.start(1)


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_are_of_the_schema(file: Path) -> None:
    for document in yaml.safe_load_all(file.read_text()):
        for own in of_kubernetes(document):
            kubernetes_validate.validate(own, "1.30", strict=True)


def of_kubernetes(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what Kubernetes has a schema for: a document of its own, or the pods that an operator's would make."""
    if document["apiVersion"].partition("/")[0] not in OPERATORS:
        return [document]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {}} | template for template in templates_in(document)]
    assert pods, f"{document['kind']} makes no pods"
    return pods


def templates_in(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        if "template" in part:
            yield part["template"]
        part = list(part.values())
    for each in part if isinstance(part, list) else ():
        yield from templates_in(each)
