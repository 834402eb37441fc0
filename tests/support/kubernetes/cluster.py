"""Clusters for tests: an API server of the tests, or the one that `KUBECONFIG` names, with a kubelet of the tests."""

import asyncio
import json
import os
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import yaml

from tests.support.kubernetes.api_server import DEPLOYMENT, NAMESPACE, SELECTOR, TOKEN, ApiServer
from tests.support.kubernetes.kubelet import Kubelet

GRACE_S = 60


class Cluster:
    """Cluster with one Deployment of engines.

    Attributes:
        kubeconfig: File of an administrator.
        namespace: Namespace of the Deployment.
        kubelet: The kubelet, which has the processes of the engines.
        server: The API server, if it is that of the tests; None: it is another one.
    """

    def __init__(self, session, url, *, kubeconfig, namespace, kubelet, server):
        self._session, self._url = session, url
        self.kubeconfig, self.namespace, self.kubelet, self.server = kubeconfig, namespace, kubelet, server

    async def call(self, method, path, body=None):
        """Makes one request to the API server; returns its answer."""
        headers = {"content-type": "application/merge-patch+json"} if method == "PATCH" else {}
        async with self._session.request(method, self._url + path, json=body, headers=headers) as response:
            return json.loads(await response.read())

    @property
    def scale_path(self):
        """Path of the scale of the Deployment."""
        return f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{DEPLOYMENT}/scale"

    @property
    def pods_path(self):
        """Path of the pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    async def replicas(self):
        """Returns the replicas that the Deployment is to have."""
        return (await self.call("GET", self.scale_path))["spec"].get("replicas", 0)

    async def scale(self, replicas):
        """Sets them, as `kubectl scale` does."""
        scale = await self.call("GET", self.scale_path)
        scale["spec"]["replicas"] = replicas
        await self.call("PUT", self.scale_path, scale)

    async def pods(self):
        """Returns the names of the pods, those that are ending included."""
        pods = await self.call("GET", f"{self.pods_path}?labelSelector=app%3Dengine")
        return {pod["metadata"]["name"] for pod in pods["items"]}

    async def delete_pod(self, name):
        """Deletes a pod, as `kubectl delete pod` and a drain of its node do."""
        await self.call("DELETE", f"{self.pods_path}/{name}")


@asynccontextmanager
async def running_cluster(folder, kubelet_options, *, is_external):
    """Runs a cluster with an empty Deployment; nothing of it is left at the end.

    Args:
        folder: Folder for its kubeconfig.
        kubelet_options: Options of `Kubelet`.
        is_external: Whether the API server is that of `KUBECONFIG`, which names it with a token.
    """
    if not is_external:
        async with ApiServer(grace_s=GRACE_S).running() as server:
            file = folder / "kubeconfig"
            file.write_text(server.kubeconfig(), encoding="utf-8")
            async with _with_kubelet(server.url, TOKEN, NAMESPACE, file, kubelet_options, server) as cluster:
                yield cluster
        return
    file = Path(os.environ["KUBECONFIG"])
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    url, token = settings["clusters"][0]["cluster"]["server"], settings["users"][0]["user"]["token"]
    namespace = f"maitred-{uuid.uuid4().hex[:8]}"
    async with _with_kubelet(url, token, namespace, file, kubelet_options, None) as cluster:
        await cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        deployments = cluster.scale_path.rpartition("/")[0].rpartition("/")[0]
        await cluster.call("POST", deployments, _deployment())
        while "spec" not in await cluster.call("GET", cluster.scale_path):  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.05)
        try:
            yield cluster
        finally:
            await cluster.call("DELETE", f"{deployments}/{DEPLOYMENT}")
            while await cluster.pods():  # noqa: ASYNC110 - only asking tells
                await asyncio.sleep(0.05)
            await cluster.call("DELETE", f"/api/v1/namespaces/{namespace}")


@asynccontextmanager
async def _with_kubelet(url, token, namespace, file, options, server):
    connector = aiohttp.TCPConnector(ssl=False)
    headers = {"authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers, connector=connector) as session,
        Kubelet(url, token, namespace, **options).running() as kubelet,
    ):
        yield Cluster(session, url, kubeconfig=file, namespace=namespace, kubelet=kubelet, server=server)
    await asyncio.sleep(0.1)  # aiohttp closes TLS connections after the session


def _deployment():
    pod = {"terminationGracePeriodSeconds": GRACE_S, "containers": [{"name": "engine", "image": "maitred"}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": DEPLOYMENT},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": SELECTOR},
            "template": {"metadata": {"labels": SELECTOR}, "spec": pod},
        },
    }
