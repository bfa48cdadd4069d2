"""Just what the engine uses of Kubernetes: one Deployment's scale and its pods, with state, over HTTP.

What the controller and the kubelet do is done too: pods come and go with the scale, those with the lowest deletion cost
first, and each is a real process, which gets SIGTERM when it is to end.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.provision.kubernetes import DELETION_COST

SCALE = re.compile(r"/apis/apps/v1/namespaces/(?P<namespace>[^/]+)/deployments/(?P<name>[^/]+)/scale")
PODS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods(?:/(?P<name>[^/]+))?")


@dataclass(slots=True)
class Pod:
    process: subprocess.Popen[bytes]
    annotations: dict[str, str] = field(default_factory=dict)
    leaving: bool = False


class KubernetesApi:
    """The API server of a cluster with one Deployment. `command` makes a pod's command of its name."""

    def __init__(self, deployment: str, labels: str, command: Callable[[str], list[str]]) -> None:
        self.deployment, self.labels, self._command = deployment, labels, command
        self.replicas, self.made = 0, 0
        self.pods: dict[str, Pod] = {}
        self.asked: list[tuple[str, str]] = []
        """Which verbs were used on which resources."""
        self.lock = threading.RLock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*api.get(urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)))

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*api.patch(urlsplit(self.path).path, body))

            def _answer(self, status: int, body: object) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def write_kubeconfig(self, path: Path) -> None:
        cluster = {"server": f"http://127.0.0.1:{self._server.server_port}"}
        context = {"cluster": "fake", "user": "fake", "namespace": "default"}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "fake",
                    "clusters": [{"name": "fake", "cluster": cluster}],
                    "users": [{"name": "fake", "user": {"token": "none"}}],
                    "contexts": [{"name": "fake", "context": context}],
                }
            )
        )

    def get(self, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        with self.lock:
            self._settle()
            if (found := SCALE.fullmatch(path)) and found["name"] == self.deployment:
                self.asked.append(("get", "deployments/scale"))
                return 200, self._scale(found["namespace"])
            if (found := PODS.fullmatch(path)) and not found["name"] and query.get("labelSelector") == [self.labels]:
                self.asked.append(("list", "pods"))
                items = [self._pod(name, pod, found["namespace"]) for name, pod in self.pods.items()]
                return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items}
        return 404, {"kind": "Status", "reason": "NotFound"}

    def patch(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            if (found := SCALE.fullmatch(path)) and found["name"] == self.deployment:
                self.asked.append(("patch", "deployments/scale"))
                self.replicas = body["spec"]["replicas"]
                self._settle()
                return 200, self._scale(found["namespace"])
            if (found := PODS.fullmatch(path)) and (pod := self.pods.get(found["name"] or "")):
                self.asked.append(("patch", "pods"))
                pod.annotations.update(body["metadata"]["annotations"])
                return 200, self._pod(found["name"], pod, found["namespace"])
        return 404, {"kind": "Status", "reason": "NotFound"}

    def _settle(self) -> None:
        """Do what the Deployment's controller and the kubelet do."""
        self.pods = {name: pod for name, pod in self.pods.items() if pod.process.poll() is None}
        staying = {name: pod for name, pod in self.pods.items() if not pod.leaving}
        by_cost = sorted(staying.values(), key=lambda pod: int(pod.annotations.get(DELETION_COST, "0")))
        for pod in by_cost[: max(0, len(staying) - self.replicas)]:
            pod.leaving = True
            pod.process.send_signal(signal.SIGTERM)
        for _ in range(self.replicas - len(staying)):
            self.made += 1
            name = f"{self.deployment}-{self.made}"
            self.pods[name] = Pod(subprocess.Popen(self._command(name), stdin=subprocess.DEVNULL))

    def _scale(self, namespace: str) -> dict[str, Any]:
        metadata = {"name": self.deployment, "namespace": namespace}
        spec, status = {"replicas": self.replicas}, {"replicas": len(self.pods)}
        return {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata, "spec": spec, "status": status}

    def _pod(self, name: str, pod: Pod, namespace: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name, "namespace": namespace, "annotations": pod.annotations}
        if pod.leaving:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        status, spec = {"phase": "Running"}, {"containers": [{"name": "worker"}]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}

    def close(self) -> None:
        with self.lock:
            self.replicas = 0
            self._settle()
            leaving = list(self.pods.values())
        for pod in leaving:
            try:
                pod.process.wait(30)
            except subprocess.TimeoutExpired:
                pod.process.kill()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
