"""Client of the Kubernetes API: the scale of one Deployment, its pods, and the lease of who scales it.

It needs these rights in the namespace, and no others: `get` and `update` of `deployments/scale`; `list`, `watch` and
`patch` of `pods`; `get`, `create` and `update` of `leases`. Sources: "Kubernetes API Concepts" (list, watch, resource
versions, bookmarks) and "ReplicaSet: Pod deletion cost" in the documentation of Kubernetes 1.34.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import Raw, Struct

from maitred.core.errors import ConfigInvalid, ReplicaUnavailable
from maitred.fleet.kubernetes.config import KubernetesConfig

if TYPE_CHECKING:
    from aiohttp import ClientResponse

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation by which a ReplicaSet picks the pods that go first: those with the least cost. Pods without it cost 0."""
REQUEST_TIMEOUT_S = 10.0
_WATCH_S = 60
"""Time in seconds after which the API server ends a watch, which is begun anew; so a broken one is noticed, too."""
_LATE_S = 10.0
"""Time in seconds after that in which it must have ended."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_GONE = 410
_MAX_FAULT_CHARACTERS = 300


class ResourceConflict(Exception):
    """Conflict: somebody has changed the object since it was read, so what was read no longer holds."""


class ObjectNotFound(Exception):
    """Error of a request for an object that is not there."""


class WatchExpired(Exception):
    """Expiry of a watch: the API server no longer has the changes since then, and everything must be listed again."""


class ObjectMetadata(Struct, frozen=True, rename="camel"):
    """Metadata of an object."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}


class PodCondition(Struct, frozen=True):
    """Condition of a pod, such as `PodScheduled`."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


class ContainerWait(Struct, frozen=True):
    """Reason why a container waits, such as `ImagePullBackOff`."""

    reason: str = ""
    message: str = ""


class ContainerState(Struct, frozen=True):
    """State of a container."""

    waiting: ContainerWait | None = None


class ContainerStatus(Struct, frozen=True, rename="camel"):
    """Status of a container."""

    name: str
    restart_count: int = 0
    state: ContainerState = ContainerState()


class PodStatus(Struct, frozen=True, rename="camel"):
    """Status of a pod."""

    phase: str = "Pending"
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[PodCondition] = []
    container_statuses: list[ContainerStatus] = []


class Pod(Struct, frozen=True):
    """Pod, with what gateways read of it."""

    metadata: ObjectMetadata
    status: PodStatus = PodStatus()

    @property
    def is_going(self) -> bool:
        """Whether it is being ended, or has ended."""
        return self.metadata.deletion_timestamp is not None or self.status.phase in ("Succeeded", "Failed")

    @property
    def is_leaving(self) -> bool:
        """Whether a gateway has marked it as the next one to go."""
        cost = self.metadata.annotations.get(DELETION_COST, "0")
        return cost.startswith("-")

    @property
    def waiting(self) -> ContainerWait | None:
        """Why one of its containers waits; None: none does."""
        return next((status.state.waiting for status in self.status.container_statuses if status.state.waiting), None)

    def condition(self, kind: str) -> PodCondition | None:
        """Returns its condition of one type; None: it has none."""
        return next((condition for condition in self.status.conditions if condition.type == kind), None)


class PodList(Struct, frozen=True):
    """Pods at one moment."""

    metadata: ObjectMetadata
    items: list[Pod]


class PodEvent(Struct, frozen=True):
    """Change of a pod."""

    type: str
    """`ADDED`, `MODIFIED`, `DELETED`; `BOOKMARK` has nothing but a later resource version."""
    pod: Pod


class ScaleSpec(Struct, frozen=True):
    """Number of replicas that is wanted."""

    replicas: int = 0


class ScaleStatus(Struct, frozen=True):
    """Status of a scale: what there is."""

    replicas: int = 0
    selector: str = ""


class Scale(Struct, frozen=True):
    """Scale of a Deployment."""

    metadata: ObjectMetadata
    spec: ScaleSpec = ScaleSpec()
    status: ScaleStatus = ScaleStatus()


class LeaseSpec(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Specification of a lease: who has it, and since when."""

    owner: str | None = msgspec.field(default=None, name="holderIdentity")
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(Struct, frozen=True):
    """Lease of the API group coordination.k8s.io: who may do something alone."""

    metadata: ObjectMetadata
    spec: LeaseSpec = LeaseSpec()


class _Event(Struct, frozen=True):
    type: str
    object: Raw


class _FaultDetails(Struct, frozen=True):
    kind: str = ""


class _Fault(Struct, frozen=True):
    code: int = 0
    message: str = ""
    details: _FaultDetails = _FaultDetails()


class KubernetesApi:
    """Client of the API server for one Deployment. Enter it before the first call.

    Each call raises `ReplicaUnavailable` if the API server does not answer, or refuses; the message says what to do.

    Args:
        config: The `kubernetes` section.

    Attributes:
        namespace: Namespace of the Deployment, known once it is entered.
    """

    def __init__(self, config: KubernetesConfig) -> None:
        self.namespace = config.namespace or "default"
        self._config = config
        self._client: Any = None
        self._apps: Any = None
        self._core: Any = None
        self._coordination: Any = None
        self._list: Any = None

    @property
    def target(self) -> str:
        """The Deployment, as messages name it."""
        return f"the Deployment {self._config.deployment} in the namespace {self.namespace}"

    async def __aenter__(self) -> Self:
        """Finds the API server.

        Raises:
            ConfigInvalid: Nothing says where it is, or the package `kubernetes` is missing.
        """
        try:
            from kubernetes.aio import client, config  # slow to import, and an extra
        except ImportError:
            raise ConfigInvalid(
                "model.backend kubernetes needs a package: pip install 'maitred[kubernetes]'."
            ) from None
        settings = client.Configuration()
        file = self._config.kubeconfig
        try:
            if file is None and (own := _own_namespace()) is not None:
                config.load_incluster_config(client_configuration=settings)
                self.namespace = self._config.namespace or own
            else:
                loader = await config.load_kube_config(
                    config_file=file, context=self._config.context, client_configuration=settings, persist_config=False
                )
                self.namespace = self._config.namespace or loader.current_context["context"].get("namespace", "default")
        except (config.ConfigException, OSError, KeyError, TypeError) as error:
            raise ConfigInvalid(
                f"Nothing says where the Kubernetes API server is: {error}. Run the gateway in a pod with a service "
                "account, or name a kubeconfig in kubernetes.kubeconfig."
            ) from error
        settings.retries = None
        self._client = client.ApiClient(settings)
        self._apps, self._core = client.AppsV1Api(self._client), client.CoreV1Api(self._client)
        self._coordination = client.CoordinationV1Api(self._client)
        self._list = self._core.list_namespaced_pod_without_preload_content
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connections to the API server."""
        await self._client.close()

    async def scale(self) -> Scale:
        """Returns the scale of the Deployment."""
        name = self._config.deployment
        read = self._apps.read_namespaced_deployment_scale_without_preload_content
        async with self._answer(read, name, self.namespace) as response:
            return msgspec.json.decode(await response.read(), type=Scale)

    async def set_replicas(self, replicas: int, seen: Scale) -> Scale:
        """Sets the number of replicas.

        Args:
            replicas: The number.
            seen: The scale as it was read: the number is set only if it still is so.

        Raises:
            ResourceConflict: The Deployment has changed since.
        """
        name = self._config.deployment
        body = {
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "resourceVersion": seen.metadata.resource_version,
                "uid": seen.metadata.uid,
            },
            "spec": {"replicas": replicas},
        }
        replace = self._apps.replace_namespaced_deployment_scale_without_preload_content
        async with self._answer(replace, name, self.namespace, body) as response:
            return msgspec.json.decode(await response.read(), type=Scale)

    async def annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        """Sets annotations of a pod, or removes those whose value is None. A pod that is gone is ignored."""
        body = {"metadata": {"uid": pod.metadata.uid, "annotations": dict(annotations)}}
        patch = self._core.patch_namespaced_pod_without_preload_content
        try:
            async with self._answer(patch, pod.metadata.name, self.namespace, body):
                pass
        except (ObjectNotFound, ResourceConflict):
            return  # it is gone, or another pod has its name, which has another uid

    async def lease(self, name: str) -> Lease | None:
        """Returns a lease; None: there is none."""
        read = self._coordination.read_namespaced_lease_without_preload_content
        try:
            async with self._answer(read, name, self.namespace) as response:
                return msgspec.json.decode(await response.read(), type=Lease)
        except ObjectNotFound:
            return None

    async def write_lease(self, name: str, lease: Lease) -> Lease:
        """Writes a lease, and makes it if it was read as None and so has no resource version.

        Raises:
            ResourceConflict: Somebody else has written it since it was read.
        """
        metadata = {
            "name": name,
            "annotations": lease.metadata.annotations,
            **({"resourceVersion": version} if (version := lease.metadata.resource_version) else {}),
        }
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": msgspec.to_builtins(lease.spec),
        }
        if version:
            call, arguments = self._coordination.replace_namespaced_lease_without_preload_content, [name]
        else:
            call, arguments = self._coordination.create_namespaced_lease_without_preload_content, []
        async with self._answer(call, *arguments, self.namespace, body) as response:
            return msgspec.json.decode(await response.read(), type=Lease)

    async def pods(self, selector: str) -> PodList:
        """Returns the pods that a label selector chooses."""
        async with self._answer(self._list, self.namespace, label_selector=selector) as response:
            return msgspec.json.decode(await response.read(), type=PodList)

    async def watch(self, selector: str, since: str) -> AsyncIterator[PodEvent]:
        """Yields the changes of the chosen pods since a resource version, until the API server ends the watch.

        Raises:
            WatchExpired: The API server no longer has the changes since then.
        """
        try:
            async with self._answer(
                self._list,
                self.namespace,
                label_selector=selector,
                resource_version=since,
                watch=True,
                allow_watch_bookmarks=True,
                timeout_seconds=_WATCH_S,
                _request_timeout=_WATCH_S + _LATE_S,
            ) as response:
                async for line in response.content:
                    if line.strip():
                        yield _decode_event(line)
        except ResourceConflict:
            raise WatchExpired from None

    @asynccontextmanager
    async def _answer(self, call: Any, *arguments: Any, **options: Any) -> "AsyncIterator[ClientResponse]":  # noqa: ANN401 - the client is made from a description and has no types
        """Makes one request of the client and yields its answer.

        Raises:
            ReplicaUnavailable: There is no answer, or a refusal.
            ResourceConflict: The object has changed since (409), or what was asked for is too old (410).
            ObjectNotFound: There is no such pod or lease.
        """
        from aiohttp import ClientError  # slow to import, and only some gateways run in a cluster

        options.setdefault("_request_timeout", REQUEST_TIMEOUT_S)
        try:
            response = await call(*arguments, **options)
            try:
                if response.status >= 400:
                    raise self._refusal(response.status, await response.read())
                yield response
            finally:
                response.close()
        except (ClientError, TimeoutError, OSError) as error:
            raise ReplicaUnavailable(
                f"The Kubernetes API server does not answer: {str(error) or type(error).__name__}."
            ) from error
        except msgspec.MsgspecError as error:
            raise ReplicaUnavailable(f"The Kubernetes API server answers with something else: {error}.") from error

    def _refusal(self, status: int, body: bytes) -> Exception:
        try:
            fault = msgspec.json.decode(body, type=_Fault)
        except msgspec.MsgspecError:
            fault = _Fault(message=body.decode("utf-8", "replace"))
        message = fault.message[:_MAX_FAULT_CHARACTERS]
        match status:
            case 409 | 410:
                return ResourceConflict(message)
            case 404 if fault.details.kind in ("pods", "leases"):
                return ObjectNotFound(message)
            case 401:
                return ReplicaUnavailable(f"The Kubernetes API server does not know this gateway: {message}")
            case 403:
                return ReplicaUnavailable(
                    f"This gateway may not do that in the cluster: {message}. Its service account needs get and update "
                    "of deployments/scale; list, watch and patch of pods; and get, create and update of leases."
                )
            case 404:
                return ReplicaUnavailable(
                    f"There is no Deployment {self._config.deployment} in the namespace {self.namespace}. Install it, "
                    "or name another one in kubernetes.deployment."
                )
        return ReplicaUnavailable(f"The Kubernetes API server refuses ({status}): {message}")


def _own_namespace() -> str | None:
    """Returns the namespace of the pod of this process; None: it runs in none, or without a service account."""
    return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() if _NAMESPACE_FILE.exists() else None


def _decode_event(line: bytes) -> PodEvent:
    """Decodes one line of a watch.

    Raises:
        WatchExpired: It says that the changes are gone.
        ReplicaUnavailable: It says another fault.
    """
    event = msgspec.json.decode(line, type=_Event)
    if event.type == "ERROR":
        fault = msgspec.json.decode(event.object, type=_Fault)
        if fault.code == _GONE:
            raise WatchExpired(fault.message)
        raise ReplicaUnavailable(f"The Kubernetes API server ends the watch of pods: {fault.message}")
    return PodEvent(event.type, msgspec.json.decode(event.object, type=Pod))
