"""Arguments of the Serve application, and the engine that a replica starts by them."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret
from maitred.fleet.local import LinkAddress, LocalEngine
from maitred.fleet.ray.config import RayReplicaConfig
from maitred.wire.address import TcpAddress
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import dialer_credentials

_END_S = 5.0
"""Time for the end of an engine's process, after its last answers."""


class ApplicationArguments(RayReplicaConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the Serve application."""

    replicas: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Replicas from the start, for a fleet that no gateway scales."""
    config: str = ""
    """YAML file with settings on the machines of the cluster, as for `maitred engine --config`."""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings in place of those of the file, such as ``{"engine": {"max_sequences": 64}}``. Secrets are references."""

    def link(self) -> LinkConfig:
        """Returns the settings of the connection with gateways, with their secrets.

        Raises:
            ConfigInvalid: The file or a secret cannot be read, or a setting is out of range.
        """
        try:
            read = msgspec.yaml.decode(Path(self.config).read_bytes()) if self.config else {}
            section = {**(read or {}).get("engine_link", {}), **self.settings.get("engine_link", {})}
            return msgspec.convert(
                section, LinkConfig, strict=False, dec_hook=lambda _, reference: Secret.read(reference)
            )
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigInvalid(f"The section engine_link for the engines on Ray: {error}") from error


def read_arguments(arguments: Mapping[str, Any]) -> ApplicationArguments:
    """Reads arguments; text that comes from a command line is converted.

    Raises:
        ConfigInvalid: There is no such argument, or its value is out of range.
    """
    try:
        return msgspec.convert(arguments, ApplicationArguments, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(f"The arguments of the application with the engines: {error}") from error


def make_engine(arguments: ApplicationArguments, host: str, port: int) -> LocalEngine:
    """Makes the engine of a replica, which listens for gateways.

    Args:
        arguments: Arguments of the application.
        host: Address of this machine, at which gateways reach it.
        port: Port of the engine.

    Raises:
        ConfigInvalid: Gateways could not connect by these settings; the message says why.
    """
    address, link = TcpAddress(host, port), arguments.link()
    return LocalEngine(
        lambda listen: engine_arguments(arguments, listen),
        listens_at=LinkAddress(address, dialer_credentials(address, link)),
        silence_timeout_s=link.silence_timeout_s,
        stop_grace_s=arguments.stop_grace_s,
    )


def engine_arguments(arguments: ApplicationArguments, listen: str) -> list[str]:
    """Returns the command of an engine: `maitred engine` with all that the arguments say."""
    command = [sys.executable, "-m", "maitred", "engine", *([arguments.model] if arguments.model else [])]
    command += ["--listen", listen, "--set", "log.format=json"]
    if arguments.config:
        command += ["--config", arguments.config]
    command += ["--set", f"engine.drain_grace_s={max(0.0, arguments.stop_grace_s - _END_S):g}"]
    if not arguments.num_gpus:
        # Ray reserves the cores and does not enforce it: an engine would take all of the machine.
        command += ["--set", f"engine.threads={max(1, int(arguments.num_cpus))}"]
    for setting in _flatten(arguments.settings):
        command += ["--set", setting]
    return command


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
