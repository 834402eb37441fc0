"""Client of Ray Serve's REST API, which the dashboard of a cluster serves: what runs, and how many replicas there are.

Source: "Serve REST API" and "External scaling" in the documentation of Ray 2.60. Targets are set in one of two ways:

- `external`: ``POST /api/v1/applications/A/deployments/D/scale``, an alpha API. It answers in about 10 ms.
- `policy`: ``PUT /api/serve/applications/`` with another lower bound for the deployment, which its autoscaling policy
  (`application.pushed_target`) returns. A PUT replaces the configurations of *all* applications, so those of the others
  are read before and sent along.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import msgspec

from maitred.core.errors import ReplicaUnavailable
from maitred.fleet.ray.config import SLOT_PREFIX, RayConfig

REQUEST_TIMEOUT_S = 30.0
_IMPORT_PATH = "maitred.fleet.ray.application:app"
_MAX_FAULT_CHARACTERS = 500


class ServeRefusal(Exception):
    """Refusal of one request by Serve, which answers others."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ServeReplica(msgspec.Struct, frozen=True):
    """Replica of a deployment, which is an actor."""

    replica_id: str
    state: str
    node_ip: str | None = None
    pid: int | None = None

    @property
    def is_going(self) -> bool:
        """Whether Serve is stopping it."""
        return self.state in ("STOPPING", "STOPPED")


class DeploymentOptions(msgspec.Struct, frozen=True):
    """Options of a deployment that gateways read."""

    user_config: dict[str, Any] | None = None
    graceful_shutdown_timeout_s: float = 20.0


class ServeDeployment(msgspec.Struct, frozen=True):
    """Deployment of an application."""

    status: str
    message: str
    target_num_replicas: int
    replicas: list[ServeReplica]
    deployment_config: DeploymentOptions = DeploymentOptions()

    @property
    def port(self) -> int | None:
        """Port of its engine; None: it is not one of ours."""
        return (self.deployment_config.user_config or {}).get("port")


class ServeApplication(msgspec.Struct, frozen=True):
    """Application as Serve describes it."""

    status: str
    message: str = ""
    deployments: dict[str, ServeDeployment] = {}
    deployed_app_config: dict[str, Any] | None = None
    """Its configuration, if it was deployed with one."""
    external_scaler_enabled: bool = False

    def takes_targets(self, scaling: str) -> bool:
        """Whether gateways may set its number of replicas in this way; see `RayReplicaConfig.scaling`."""
        if scaling == "external":
            return self.external_scaler_enabled
        return self.deployed_app_config is not None and not self.external_scaler_enabled


class ServeDetails(msgspec.Struct, frozen=True):
    """All applications of a cluster; empty where Serve does not run."""

    applications: dict[str, ServeApplication] = {}
    controller_info: dict[str, Any] = {}


class ServeApi:
    """Client of the REST API of one cluster. Entering opens it.

    Args:
        config: The `ray` section.
    """

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "ServeApi":
        token = self._config.token
        self._session = aiohttp.ClientSession(
            self._config.address,
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
            headers={} if token is None else {"Authorization": f"Bearer {token.reveal()}"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def application(self) -> ServeApplication | None:
        """Returns the application; None: the cluster does not have it, or it is being deleted.

        Raises:
            ReplicaUnavailable: The cluster does not answer, or something else answers in its place.
        """
        found = (await self._details()).applications.get(self._config.application)
        return None if found is None or found.status == "DELETING" else found

    async def deploy(self, arguments: Mapping[str, object]) -> None:
        """Deploys the application beside the others.

        Args:
            arguments: Its arguments.

        Raises:
            ReplicaUnavailable: The cluster does not answer, or does not take the application.
        """
        configuration: dict[str, Any] = {
            "name": self._config.application,
            "import_path": _IMPORT_PATH,
            "route_prefix": None,
            "args": arguments,
            "external_scaler_enabled": self._config.replica.scaling == "external",
        }
        if self._config.replica.scaling == "policy":
            names = [f"{SLOT_PREFIX}{number}" for number in range(self._config.replica.max_replicas)]
            configuration = with_target(configuration, names, names[0], 0)
        details = await self._details()
        try:
            await self._put(details, configuration)
        except ServeRefusal as refusal:
            raise ReplicaUnavailable(refusal.message) from refusal

    async def scale(self, deployment: str, replicas: int) -> None:
        """Sets the target of a deployment, 0 or 1. Serve follows it later.

        Raises:
            ReplicaUnavailable: The cluster does not answer.
            ServeRefusal: It does not take this target.
        """
        if self._config.replica.scaling == "external":
            await self._request(
                "POST",
                f"/api/v1/applications/{self._config.application}/deployments/{deployment}/scale",
                {"target_num_replicas": replicas},
            )
            return
        details = await self._details()
        found = details.applications.get(self._config.application)
        if found is None or found.deployed_app_config is None:
            raise ServeRefusal(
                f"The application {self._config.application} was not deployed with a configuration, which "
                "ray.replica.scaling `policy` changes. Deploy it with `serve deploy`, or use `external`."
            )
        await self._put(details, with_target(found.deployed_app_config, found.deployments, deployment, replicas))

    async def _details(self) -> ServeDetails:
        try:
            answer = await self._request("GET", "/api/serve/applications/")
            return msgspec.json.decode(answer, type=ServeDetails)
        except ServeRefusal as refusal:
            raise ReplicaUnavailable(refusal.message) from refusal
        except msgspec.DecodeError as error:
            raise ReplicaUnavailable(
                f"What answers at {self._config.address} is not the dashboard of a Ray cluster with Serve: {error}. "
                "Correct ray.address."
            ) from error

    async def _put(self, details: ServeDetails, configuration: Mapping[str, object]) -> None:
        others = [
            application.deployed_app_config
            for name, application in details.applications.items()
            if name != self._config.application and application.deployed_app_config is not None
        ]
        # No proxies, unless Serve runs already and has them: HTTP is what gateways are for.
        location: dict[str, object] = {} if details.controller_info.get("actor_id") else {"proxy_location": "Disabled"}
        await self._request("PUT", "/api/serve/applications/", {**location, "applications": [*others, configuration]})

    async def _request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> bytes:
        assert self._session is not None, "enter the client first"
        address = self._config.address
        try:
            async with self._session.request(method, path, json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaUnavailable(f"Ray's dashboard at {address} does not answer: {error or 'time-out'}.") from error
        if response.status in (401, 403):
            raise ReplicaUnavailable(
                f"Ray's dashboard at {address} wants another token. Set ray.token to what `ray get-auth-token` prints "
                "on a machine of the cluster."
            )
        if response.status != 200:
            fault = answer.decode(errors="replace").strip()[:_MAX_FAULT_CHARACTERS]
            message = f"Ray Serve refused {method} {path} with {response.status}: {fault}"
            raise ServeRefusal(message) if 400 <= response.status < 500 else ReplicaUnavailable(message)
        return answer


def with_target(
    configuration: Mapping[str, Any], names: Iterable[str], deployment: str, replicas: int
) -> dict[str, Any]:
    """Returns the configuration of an application with another target for the policy of a deployment.

    Serve counts a configuration with an entry for one more deployment as another version of the code, and starts all
    replicas anew. So there is always an entry for each.

    Args:
        configuration: The configuration; it is not changed.
        names: Names of all deployments.
        deployment: The deployment.
        replicas: Its target.
    """
    entries = {name: {"name": name, "autoscaling_config": policy_scaling(0)} for name in names}
    entries |= {entry["name"]: entry for entry in configuration.get("deployments", [])}
    entries[deployment] = {**entries[deployment], "autoscaling_config": policy_scaling(replicas)}
    return {**configuration, "deployments": list(entries.values())}


def policy_scaling(replicas: int) -> dict[str, Any]:
    """Returns the autoscaling settings of a deployment with this target.

    Only bounds differ between two targets. Another policy would be another version of the application's code, for which
    Serve starts all replicas anew.
    """
    return {
        "min_replicas": replicas,
        "max_replicas": 1,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "policy": {"policy_function": "maitred.fleet.ray.application:pushed_target"},
    }
