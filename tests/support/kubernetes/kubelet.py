"""Kubelet whose pods are engine processes of this machine. It works with any API server.

A pod gets a loopback address of its own, so that all engines listen on one port. A pod that is deleted gets SIGTERM and
ends when its engine has given its answers, or after its grace.
"""

import asyncio
import itertools
import json
import signal
import sys
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime

import aiohttp

NODE = "node-1"
_CONDITIONS = ("Initialized", "PodScheduled", "ContainersReady", "Ready")
_addresses = itertools.count(1)


class Kubelet:
    """Kubelet of the only node; `running` starts it.

    Args:
        url: Address of the API server.
        token: Token of an administrator.
        namespace: Namespace of the pods.
        port: Port of the engines.
        environment: Environment of the engines.
        arguments: Further arguments of `maitred engine`.

    Attributes:
        engines: Process of the engine of each pod.
        held: Names of pods that are not started, as where an image cannot be had.
    """

    def __init__(self, url, token, namespace, *, port, environment, arguments=()):
        self.url, self.namespace, self.port = url, namespace, port
        self.engines = {}
        self.is_held = False
        self._headers = {"authorization": f"Bearer {token}"}
        self._environment, self._arguments = environment, arguments
        self._tasks = {}
        self._deleted = {}

    @asynccontextmanager
    async def running(self):
        """Runs until the block ends; no engine is left then."""
        connector = aiohttp.TCPConnector(ssl=False)
        async with aiohttp.ClientSession(headers=self._headers, connector=connector) as self.session:
            await self._make_node()
            watch = asyncio.create_task(self._watch())
            try:
                yield self
            finally:
                for task in (watch, *self._tasks.values()):
                    task.cancel()
                await asyncio.wait([watch, *self._tasks.values()])
                for engine in self.engines.values():
                    with suppress(ProcessLookupError):
                        engine.kill()
                    await engine.wait()

    async def _make_node(self):
        await self._call("POST", "/api/v1/nodes", {"metadata": {"name": NODE}, "spec": {}})
        size = {"cpu": "64", "memory": "64Gi", "pods": "110"}
        ready = _condition("Ready") | {"lastHeartbeatTime": _now(), "reason": "KubeletReady", "message": ""}
        status = {"status": {"capacity": size, "allocatable": size, "conditions": [ready]}}
        await self._call("PATCH", f"/api/v1/nodes/{NODE}/status", status)

    @property
    def _path(self):
        return f"/api/v1/namespaces/{self.namespace}/pods"

    async def _call(self, method, path, body=None):
        headers = {"content-type": "application/merge-patch+json"} if method == "PATCH" else {}
        async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def _watch(self):
        while True:
            with suppress(aiohttp.ClientError, TimeoutError, OSError, KeyError):
                _, pods = await self._call("GET", self._path)
                for pod in pods["items"]:
                    self._see(pod)
                query = {"watch": "1", "resourceVersion": pods["metadata"]["resourceVersion"], "timeoutSeconds": "30"}
                async with self.session.get(self.url + self._path, params=query) as response:
                    async for line in response.content:
                        event = json.loads(line)
                        if event["type"] in ("ADDED", "MODIFIED"):
                            self._see(event["object"])
            await asyncio.sleep(0.1)

    def _see(self, pod):
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        deleted = self._deleted.setdefault(uid, asyncio.Event())
        if pod["metadata"].get("deletionTimestamp"):
            deleted.set()
        if uid not in self._tasks:
            grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
            self._tasks[uid] = asyncio.create_task(self._run(name, deleted, grace_s), name=f"pod {name}")

    async def _run(self, name, deleted, grace_s):
        """Runs one pod to its end."""
        address = f"127.0.3.{next(_addresses)}"
        path = f"{self._path}/{name}"
        if not deleted.is_set():
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            await self._call("POST", f"{path}/binding", {"metadata": {"name": name}, "target": target})
        restarts = 0
        while not deleted.is_set():
            if self.is_held:
                await self._report(path, address, ready=False, waiting="ImagePullBackOff")
                await asyncio.sleep(0.1)
                continue
            engine = self.engines[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "maitred", "engine", "--listen", f"tcp:{address}:{self.port}",
                *self._arguments, env=self._environment,
            )  # fmt: skip
            await self._report(path, address, ready=False, restarts=restarts)
            probe = asyncio.create_task(self._probe(path, address, restarts))
            ended, told = asyncio.create_task(engine.wait()), asyncio.create_task(deleted.wait())
            await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
            probe.cancel()
            told.cancel()
            if deleted.is_set() and not ended.done():
                engine.send_signal(signal.SIGTERM)
                await asyncio.wait({ended}, timeout=grace_s)
                if not ended.done():
                    engine.kill()
                    await ended
            restarts += 1
        await self._call("DELETE", path, {"gracePeriodSeconds": 0})

    async def _probe(self, path, address, restarts):
        """Makes the pod ready once its engine listens."""
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(address, self.port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        await self._report(path, address, ready=True, restarts=restarts)

    async def _report(self, path, address, *, ready, restarts=0, waiting=""):
        states = {"Initialized": True, "PodScheduled": True, "ContainersReady": ready, "Ready": ready}
        state = (
            {"waiting": {"reason": waiting, "message": "no such image"}}
            if waiting
            else {"running": {"startedAt": _now()}}
        )
        container = {
            "name": "engine",
            "ready": ready,
            "restartCount": restarts,
            "image": "",
            "imageID": "",
            "state": state,
        }
        status = {
            "phase": "Pending" if waiting else "Running",
            "podIP": None if waiting else address,
            "conditions": [_condition(kind, state=states[kind]) for kind in _CONDITIONS],
            "containerStatuses": [container],
        }
        await self._call("PATCH", f"{path}/status", {"status": status})


def _condition(kind, *, state=True):
    return {"type": kind, "status": "True" if state else "False", "lastTransitionTime": _now()}


def _now():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
