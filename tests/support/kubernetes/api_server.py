"""Kubernetes API server for tests, in this process: pods, the scale of one Deployment, and its controller.

It does what the documentation of Kubernetes 1.34 says of lists, watches, resource versions, 409, 410, preconditions,
graceful deletion and the deletion cost of pods. The same tests run against a real API server (`make test-cluster`).
"""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager, suppress
from copy import deepcopy

from aiohttp import web

NAMESPACE, DEPLOYMENT, TOKEN = "models", "maitred-engine", "token-of-an-administrator"
SELECTOR = {"app": "engine"}
_WATCHED = ("ADDED", "MODIFIED", "DELETED")


class ApiServer:
    """API server with one Deployment; `running` starts it.

    Attributes:
        url: Its address, once it runs.
        kept_events: How many events a watch can go back to; fewer are known after `forget_events`.
        is_down: Whether it refuses every request with 503 and ends all watches.
        knows_costs: Whether the deletion costs of pods count, as from Kubernetes 1.22 on.
        before_scale: Called before each change of the scale is looked at, as somebody else who is quicker.
    """

    def __init__(self, *, replicas=0, grace_s=60):
        self.url = ""
        self.is_down, self.knows_costs = False, True
        self.before_scale = lambda: None
        self.requests = []
        self._version = itertools.count(1)
        self._names = itertools.count(1)
        self._oldest = 0
        self._events = []
        self._changed = asyncio.Event()
        self.pods, self.leases = {}, {}
        self._grace_s = grace_s
        self.deployment = {
            "metadata": {"name": DEPLOYMENT, "namespace": NAMESPACE, "uid": "d-1", "resourceVersion": self._next()},
            "spec": {"replicas": replicas},
        }

    @asynccontextmanager
    async def running(self):
        """Serves on a free port, and makes and ends pods, until the block ends."""
        application = web.Application(middlewares=[self._refuse_while_down])
        pods, scale = f"/api/v1/namespaces/{NAMESPACE}/pods", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        application.add_routes(
            [
                web.get(pods, self._list_or_watch),
                web.patch(pods + "/{name}", self._patch),
                web.patch(pods + "/{name}/status", self._patch),
                web.post(pods + "/{name}/binding", self._bind),
                web.delete(pods + "/{name}", self._delete),
                web.get(scale + "/{name}/scale", self._read_scale),
                web.put(scale + "/{name}/scale", self._put_scale),
                web.get(leases + "/{name}", self._read_lease),
                web.post(leases, self._write_lease),
                web.put(leases + "/{name}", self._write_lease),
                web.post("/api/v1/nodes", _accept),
                web.patch("/api/v1/nodes/{name}/status", _accept),
            ]
        )
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        controller = asyncio.create_task(self._control())
        try:
            yield self
        finally:
            controller.cancel()
            await asyncio.wait([controller])
            await runner.cleanup()

    def kubeconfig(self):
        """Returns the text of a kubeconfig of an administrator."""
        cluster, user = {"server": self.url}, {"token": TOKEN}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
                "current-context": "x",
            }
        )

    def forget_events(self):
        """Forgets all events, so that every watch has to list again."""
        self._events.clear()
        self._oldest = self._latest
        self._changed.set()

    def give_lease(self, epoch, name="scaler"):
        """Gives the lease to whoever has this epoch."""
        metadata = {"name": name, "resourceVersion": self._next()}
        self.leases[name] = {"metadata": metadata, "spec": {"leaseTransitions": epoch}}

    def scale(self, replicas):
        """Sets the scale, as `kubectl scale` does."""
        self.deployment["spec"]["replicas"] = replicas
        self._touch_deployment()

    def _touch_deployment(self):
        self.deployment["metadata"]["resourceVersion"] = self._next()
        self._changed.set()

    def _next(self):
        self._latest = next(self._version)
        return str(self._latest)

    def _emit(self, kind, pod):
        pod["metadata"]["resourceVersion"] = self._next()
        self._events.append((self._latest, kind, deepcopy(pod)))
        self._changed.set()

    # --- controller ---

    async def _control(self):
        """Makes and ends pods until there are as many as the Deployment says."""
        while True:
            living = [pod for pod in self.pods.values() if "deletionTimestamp" not in pod["metadata"]]
            wanted = self.deployment["spec"]["replicas"]
            for _ in range(wanted - len(living)):
                self._make_pod()
            for pod in sorted(living, key=self._rank)[: max(0, len(living) - wanted)]:
                self._end(pod, self._grace_s)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await self._changed.wait()
            await asyncio.sleep(0.01)

    def _rank(self, pod):
        """Order in which pods end: without a node, not running, not ready, with the least cost, the newest first."""
        conditions = {condition["type"]: condition["status"] for condition in pod["status"].get("conditions", [])}
        cost = int(pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost", "0"))
        number = int(pod["metadata"]["name"].rpartition("-")[2])
        return (
            "nodeName" in pod["spec"],
            pod["status"]["phase"] == "Running",
            conditions.get("Ready") == "True",
            cost if self.knows_costs else 0,
            -number,
        )

    def _make_pod(self):
        number = next(self._names)
        name = f"{DEPLOYMENT}-{number:05d}"
        pod = {
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"p-{number}", "labels": dict(SELECTOR)},
            "spec": {"terminationGracePeriodSeconds": self._grace_s, "containers": [{"name": "engine"}]},
            "status": {"phase": "Pending"},
        }
        self.pods[name] = pod
        self._emit("ADDED", pod)

    def _end(self, pod, grace_s):
        if grace_s == 0:
            del self.pods[pod["metadata"]["name"]]
            self._emit("DELETED", pod)
        elif "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace_s}
            self._emit("MODIFIED", pod)

    # --- requests ---

    @web.middleware
    async def _refuse_while_down(self, request, handler):
        self.requests.append((request.method, request.path))
        if self.is_down:
            return _fault(503, "the server is being started")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _fault(401, "Unauthorized")
        return await handler(request)

    async def _list_or_watch(self, request):
        wanted = request.query.get("labelSelector", "")
        chosen = [
            pod
            for pod in self.pods.values()
            if not wanted
            or all(f"{key}={value}" in wanted.split(",") for key, value in pod["metadata"]["labels"].items())
        ]
        if request.query.get("watch") not in ("1", "true", "True"):
            return web.json_response({"metadata": {"resourceVersion": str(self._latest)}, "items": chosen})
        return await self._watch(request, int(request.query["resourceVersion"]), float(request.query["timeoutSeconds"]))

    async def _watch(self, request, since, seconds):
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(seconds):
                while not self.is_down:
                    if since < self._oldest:
                        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": f"too old: {since}"}
                        await response.write(_line("ERROR", gone))
                        break
                    for version, kind, pod in [event for event in self._events if event[0] > since]:
                        since = version
                        await response.write(_line(kind, pod))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await asyncio.shield(self._changed.wait())
                    await asyncio.sleep(0)
        return response

    async def _patch(self, request):
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _fault(404, "pod not found", "pods")
        body = json.loads(await request.read())
        if body.get("metadata", {}).get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
            return _fault(409, "the UID in the precondition does not match", "pods")
        _merge(pod, body)
        self._emit("MODIFIED", pod)
        return web.json_response(pod)

    async def _bind(self, request):
        pod = self.pods[request.match_info["name"]]
        pod["spec"]["nodeName"] = (await request.json())["target"]["name"]
        self._emit("MODIFIED", pod)
        return web.json_response({"status": "Success"})

    async def _delete(self, request):
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _fault(404, "pod not found", "pods")
        body = await request.json() if request.can_read_body else {}
        self._end(pod, body.get("gracePeriodSeconds", self._grace_s))
        return web.json_response(pod)

    async def _read_scale(self, request):
        if request.match_info["name"] != DEPLOYMENT:
            return _fault(404, "deployment not found", "deployments")
        return web.json_response(self._scale_object())

    async def _put_scale(self, request):
        self.before_scale()
        body = await request.json()
        if body["metadata"]["resourceVersion"] != self.deployment["metadata"]["resourceVersion"]:
            return _fault(409, "the object has been modified; please apply your changes to the latest version")
        self.scale(body["spec"]["replicas"])
        return web.json_response(self._scale_object())

    async def _read_lease(self, request):
        lease = self.leases.get(request.match_info["name"])
        return _fault(404, "lease not found", "leases") if lease is None else web.json_response(lease)

    async def _write_lease(self, request):
        lease = await request.json()
        name = lease["metadata"]["name"]
        known = self.leases.get(name)
        version = lease["metadata"].get("resourceVersion")
        if version != (None if known is None else known["metadata"]["resourceVersion"]):
            return _fault(409, "the object has been modified", "leases")
        lease["metadata"]["resourceVersion"] = self._next()
        self.leases[name] = lease
        return web.json_response(lease)

    def _scale_object(self):
        selector = ",".join(f"{key}={value}" for key, value in SELECTOR.items())
        return {
            "kind": "Scale",
            "metadata": dict(self.deployment["metadata"]),
            "spec": dict(self.deployment["spec"]),
            "status": {"replicas": len(self.pods), "selector": selector},
        }


def _merge(target, patch):
    """Applies a merge patch (RFC 7396)."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _line(kind, thing):
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def _fault(status, message, kind=""):
    body = {"kind": "Status", "status": "Failure", "code": status, "message": message, "details": {"kind": kind}}
    return web.json_response(body, status=status)


async def _accept(request):
    return web.json_response({}, status=201)
