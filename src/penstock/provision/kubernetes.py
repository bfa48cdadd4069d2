"""Kubernetes: a place is a pod of one Deployment, whose scale is set.

The Deployment keeps pods alive and places them; this says how many there are, and which of them go first: those that
are released get the lowest deletion cost before the scale is lowered, so that the controller takes just them. A pod
that is told to end gets SIGTERM, which `penstock worker` takes as *leave in peace*.

Four verbs on three resources are used: get and patch `deployments/scale`, list and patch `pods`. The Role in
`deploy/kubernetes` allows these and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.core.errors import MissingExtraError
from penstock.provision.engines import EngineError

KIND = "kubernetes"
TIMEOUT_S = 20.0
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
GOES_FIRST = "-1000"


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which Deployment runs the workers."""

    deployment: str = "penstock-worker"
    namespace: str = "default"
    pods: str = "app=penstock-worker"
    """The label selector of its pods."""
    kubeconfig: str | None = None
    """None: the service account of the pod this runs in, else the user's own configuration."""


class KubernetesEngine:
    """Runs places as pods of a Deployment. See `engines.Engine`; the pods' command stands in their manifest."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        client = _configured(options.kubeconfig)
        self._apps, self._core = client.AppsV1Api(), client.CoreV1Api()

    @property
    def kind(self) -> str:
        return KIND

    def start(self, count: int) -> None:
        self._set_scale(self._scale() + count)

    def names(self) -> frozenset[str]:
        pods = self._pods()
        # Pods that the controller has not made yet have no name. They are counted: asked for twice, they come twice.
        waiting = max(0, self._scale() - len(pods))
        return frozenset(pods) | {f"{self._options.deployment}-to-come-{number}" for number in range(waiting)}

    def release(self, names: Collection[str]) -> None:
        leaving = sorted(set(names) & self.names())
        if not leaving:
            return
        for pod in set(leaving) & self._pods():
            with _told("mark a pod that is to go"):
                self._core.patch_namespaced_pod(
                    pod,
                    self._options.namespace,
                    {"metadata": {"annotations": {DELETION_COST: GOES_FIRST}}},
                    _request_timeout=TIMEOUT_S,
                )
        self._set_scale(self._scale() - len(leaving))

    def close(self) -> None:
        self._set_scale(0)

    def _scale(self) -> int:
        with _told("read the scale"):
            scale = self._apps.read_namespaced_deployment_scale(
                self._options.deployment, self._options.namespace, _request_timeout=TIMEOUT_S
            )
        return int(scale.spec.replicas or 0)

    def _set_scale(self, replicas: int) -> None:
        with _told("set the scale"):
            self._apps.patch_namespaced_deployment_scale(
                self._options.deployment,
                self._options.namespace,
                {"spec": {"replicas": max(0, replicas)}},
                _request_timeout=TIMEOUT_S,
            )

    def _pods(self) -> frozenset[str]:
        """Return the pods that are not already on their way out."""
        with _told("list the pods"):
            listed = self._core.list_namespaced_pod(
                self._options.namespace, label_selector=self._options.pods, _request_timeout=TIMEOUT_S
            )
        alive = (pod for pod in listed.items if pod.metadata.deletion_timestamp is None)
        return frozenset(pod.metadata.name for pod in alive if pod.status.phase not in ("Succeeded", "Failed"))


def _configured(kubeconfig: str | None) -> Any:
    try:
        from kubernetes import client, config
    except ImportError:
        raise MissingExtraError("kubernetes", "kubernetes") from None
    try:
        if kubeconfig is None:
            config.load_config()
        else:
            config.load_kube_config(kubeconfig)
    except config.ConfigException as error:
        raise EngineError(f"no cluster is configured: {error}; give a kubeconfig, or run this in a pod") from None
    return client


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what the client raises into one sentence."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise EngineError(f"Kubernetes refused to {what}: {error.status} {error.reason}") from None
    except HTTPError as error:
        raise EngineError(f"could not {what}: the API server does not answer ({type(error).__name__})") from None
