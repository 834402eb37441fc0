"""Models of upstream servers: opened, probed, reconfigured and closed; and the headers that name them to clients."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maitred.admission.prices import PriceList
from maitred.api.litellm.headers import LitellmHeaders
from maitred.app.runtime import KeyedTasks
from maitred.config.tree import Config, TextModelConfig
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.request import AnyEndpoint, Endpoint
from maitred.observe.metrics.upstreams import UpstreamState
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.pool import PoolHealth
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.catalog import TextModel
from maitred.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from maitred.replica.http.pool import OpenConnections
    from maitred.replica.upstream.replica import UpstreamReplica
    from maitred.replica.upstream.status import UpstreamStatus

_FIRST_PROBE_TIMEOUT_S = 0.5
"""Longest wait for new servers at a start or a reload, which is not delayed further; until it has been probed, a new
server counts as away."""
_HEALTH = HealthConfig()


@dataclass(frozen=True, slots=True)
class UpstreamModels:
    """Models of upstream servers under one configuration.

    Attributes:
        models: The models for the catalog.
        servers: Each model with its upstream servers.
    """

    models: Sequence[TextModel]
    servers: "Mapping[str, Sequence[UpstreamReplica]]"

    def endpoints(self) -> dict[str, list[AnyEndpoint]]:
        """Returns the endpoints for dispatch.

        The capacity of upstream servers is unknown, so their in-flight limits are learnt.
        """
        return {
            name: [
                Endpoint(
                    server.name,
                    server,
                    reports_capacity=False,
                    admin_state=server.status.admin_state,
                    external_load=None if server.dialect.load_gauges is None else server.external_load,
                )
                for server in servers
            ]
            for name, servers in self.servers.items()
        }

    def all(self) -> "Iterable[UpstreamReplica]":
        """Returns every server, once for each model that it runs."""
        return (server for servers in self.servers.values() for server in servers)


class Upstreams:
    """Current models of upstream servers.

    A new configuration is prepared first, which may fail and changes nothing, and then adopted, which cannot fail. A
    server with unchanged settings keeps its object and its connections. A server with other connection settings, but
    the same address and name, keeps its known health.

    Args:
        probes: The tasks that probe the servers in use.
        stack: Closes the connections, if there are any.

    Attributes:
        current: The models that the servers run now.
    """

    def __init__(self, probes: "KeyedTasks[UpstreamReplica]", stack: AsyncExitStack) -> None:
        self.current = UpstreamModels([], {})
        self._connections: OpenConnections | None = None
        self._probes = probes
        self._stack = stack
        self._pool_health: dict[str, PoolHealth] = {}
        self._tokenizers: dict[str, str | None] = {}

    @property
    def models(self) -> Sequence[TextModel]:
        """Models for the catalog."""
        return self.current.models

    def endpoints(self) -> dict[str, list[AnyEndpoint]]:
        """Returns the endpoints of each model, for dispatch."""
        return self.current.endpoints()

    def context_tokens_by_pool(self) -> dict[str, int]:
        """Returns the largest context length of each model, as its servers report it."""
        return {
            name: server.reported_context_tokens
            for name, servers in self.current.servers.items()
            for server in servers
            if server.reported_context_tokens is not None
        }

    async def prepare(self, configs: Mapping[str, TextModelConfig], health: HealthConfig) -> UpstreamModels:
        """Makes the models that a configuration would serve, without serving them.

        Raises:
            ConfigInvalid: A URL, a certificate file or a tokenizer cannot be used.
        """
        configs = {name: config for name, config in configs.items() if config.upstreams}
        if not configs:
            return UpstreamModels([], {})
        if self._connections is None:
            # A gateway that has only its own engines starts faster without an HTTP client.
            from maitred.replica.http.pool import OpenConnections

            self._connections = await self._stack.enter_async_context(OpenConnections())
        return await asyncio.to_thread(self._prepare, configs, self._connections, health)

    def _prepare(
        self, configs: Mapping[str, TextModelConfig], connections: "OpenConnections", health: HealthConfig
    ) -> UpstreamModels:
        """Makes the models; it reads files, so it is called in a thread."""
        servers = {
            name: [self._server(upstream, name, config, connections, health) for upstream in config.upstreams]
            for name, config in configs.items()
        }
        before = {model.name: model for model in self.current.models}
        return UpstreamModels(
            [self._model(name, config, servers[name], before) for name, config in configs.items()], servers
        )

    async def refresh(self, served: UpstreamModels) -> None:
        """Probes new servers once, so that they do not begin as unavailable."""
        from maitred.replica.upstream.probe import HealthProbe

        known = {server.status for server in self.current.all()}
        unseen = [server for server in served.all() if server.status not in known]
        if unseen:
            probe_tasks = [
                asyncio.create_task(HealthProbe(server).probe_once(), name=f"first probe of {server.name}")
                for server in unseen
            ]
            _, late = await asyncio.wait(probe_tasks, timeout=_FIRST_PROBE_TIMEOUT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def reconfigure(self, served: UpstreamModels, configs: Mapping[str, TextModelConfig], health: HealthConfig) -> None:
        """Serves these models from now on."""
        staying = {server.status for server in served.all()}
        for server in self.current.all():
            if server.status not in staying:
                server.status.join_pool(PoolHealth(health.outliers))  # its health is not compared any more
        self.current = served
        self._tokenizers = {name: config.tokenizer for name, config in configs.items()}
        self._pool_health = {
            name: self._pool_health.get(name) or PoolHealth(health.outliers) for name in served.servers
        }
        for name, servers in served.servers.items():
            for server in servers:
                server.status.join_pool(self._pool_health[name])
                server.status.reconfigure(server.config.probe_every_s, health)
        self._probes.begin(served.all())

    def retire(self, in_use: Iterable[UpstreamModels]) -> None:
        """Stops the probes of servers that no generation uses any more."""
        self._probes.only(server for served in in_use for server in served.all())

    def states(self) -> dict[tuple[str, str], UpstreamState]:
        """Returns the state of each upstream server for metrics."""
        return {
            (name, server.name): UpstreamState(
                up=server.status.is_up,
                open_requests=server.open_streams,
                running=server.scraped_load.running,
                waiting=server.scraped_load.waiting,
                kv_usage=server.scraped_load.kv_usage,
                breaker=server.status.breaker_state,
                weight=server.weight,
                account_refused=server.status.account_refused,
            )
            for name, servers in self.current.servers.items()
            for server in servers
        }

    def _server(
        self,
        config: UpstreamConfig,
        name: str,
        model: TextModelConfig,
        connections: "OpenConnections",
        health: HealthConfig,
    ) -> "UpstreamReplica":
        here = self.current.servers.get(name, ())
        before = next((server for server in here if server.is_same_server(config)), None)
        if before is not None and before.has_settings(config, model.context_tokens, model.max_choices):
            return before
        return _upstream(config, name, model, connections, health, before)

    def _model(
        self, name: str, config: TextModelConfig, servers: "Sequence[UpstreamReplica]", before: Mapping[str, TextModel]
    ) -> TextModel:
        known = before.get(name)
        reprompts = config.reprompts and all(server.can_continue for server in servers)
        at_fallback = config.continues_at_fallback
        if known is None:
            tokenizer = _tokenizer(config)
            return TextModel(
                name, servers, tokenizer, reprompts=reprompts, continues_at_fallback=at_fallback, mode=config.mode
            )
        same = self._tokenizers.get(name) == config.tokenizer
        tokenizer = known.tokenizer if same else _tokenizer(config)
        return known.with_replicas(
            servers, tokenizer, reprompts=reprompts, continues_at_fallback=at_fallback, mode=config.mode
        )


@asynccontextmanager
async def open_upstreams(
    models: Mapping[str, TextModelConfig],
    health: HealthConfig = _HEALTH,
    *,
    make_status: "Callable[[UpstreamReplica], UpstreamStatus] | None" = None,
) -> AsyncIterator[Upstreams]:
    """Opens the configured models of upstream servers. This process or another one starts to probe their servers.

    Args:
        models: The configured models; those with upstream servers are opened.
        health: Settings that decide when an unhealthy server gets fewer requests or none.
        make_status: Makes the status of a server if another process decides on health and probes the servers; None:
            this process does.

    Raises:
        ConfigInvalid: A URL, a certificate file or a tokenizer cannot be used.
    """
    async with (
        AsyncExitStack() as stack,
        KeyedTasks(_probing, lambda server: f"probe of {server.name}") as probes,
    ):
        upstreams = Upstreams(probes, stack)
        served = await upstreams.prepare(models, health)
        if make_status is None:
            await upstreams.refresh(served)
            upstreams.reconfigure(served, models, health)
        else:
            upstreams.current = served
            for server in served.all():
                server.status = make_status(server)
        yield upstreams


async def _probing(server: "UpstreamReplica") -> None:
    from maitred.replica.upstream.probe import HealthProbe

    await HealthProbe(server).run()


def _upstream(
    config: UpstreamConfig,
    name: str,
    model: TextModelConfig,
    connections: "OpenConnections",
    health: HealthConfig,
    before: "UpstreamReplica | None",
) -> "UpstreamReplica":
    from maitred.replica.upstream.replica import UpstreamReplica

    try:
        return UpstreamReplica(
            config,
            name,
            connections,
            context_tokens=model.context_tokens,
            max_choices=model.max_choices,
            health=health,
            previous=before,
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(f"The certificates in {config.ca_file} cannot be used: {error}.") from error


def _tokenizer(config: TextModelConfig) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    path = Path(config.tokenizer)
    # Prompts are counted as the servers read them, and those look for control tokens in messages, too.
    return Tokenizer.load(
        path.parent if path.name == "tokenizer.json" else path,
        allows_control_tokens=True,
        cache_bytes=config.tokenizer_cache_bytes,
    )


def litellm_headers(config: Config, clock: Clock) -> LitellmHeaders | None:
    """Returns the reader and writer of LiteLLM's headers; None: they mean nothing here."""
    if not config.server.litellm_compatibility:
        return None
    single = {name: model.upstreams[0].url for name, model in config.models.items() if len(model.upstreams) == 1}
    return LitellmHeaders(PriceList(config.admission.prices), single, clock)
