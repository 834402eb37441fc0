"""Models that servers of others run: opened, looked at, closed."""

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from maitred import __version__
from maitred.app.stores import running
from maitred.config.tree import TextModelConfig
from maitred.core.errors import ConfigInvalid
from maitred.dispatch.errand import AnyPost, Post
from maitred.observe.upstreams import UpstreamState
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.peers import Peers
from maitred.replica.upstream.config import UpstreamConfig
from maitred.routing.catalog import TextModel
from maitred.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import aiohttp

    from maitred.replica.upstream.server import Upstream

_KEEP_OPEN_S = 3.0
"""Less than servers keep an idle connection (uvicorn 5 s, Node 5 s): the one that closes it should be this end."""


_HEALTH = HealthConfig()


class Upstreams:
    """The models that servers of others run.

    Args:
        servers: Each model with its servers.

    Attributes:
        models: For the catalog.
    """

    def __init__(self, servers: "Mapping[str, Sequence[Upstream]]", models: Sequence[TextModel]) -> None:
        self.models = models
        self._servers = servers

    def posts(self) -> dict[str, list[AnyPost]]:
        """For dispatch. Nobody knows what such servers have left: their windows are learnt."""
        return {
            name: [
                Post(
                    server.name,
                    server,
                    exact=False,
                    duty=server.standing.duty,
                    hearsay=None if server.dialect.gauges is None else server.hearsay,
                )
                for server in servers
            ]
            for name, servers in self._servers.items()
        }

    def states(self) -> dict[tuple[str, str], UpstreamState]:
        """For metrics."""
        return {
            (name, server.name): UpstreamState(
                server.standing.up,
                server.open_streams,
                server.reported.running,
                server.reported.waiting,
                server.reported.kv_usage,
                server.standing.breaker,
                server.weight,
            )
            for name, servers in self._servers.items()
            for server in servers
        }


@asynccontextmanager
async def open_upstreams(
    models: Mapping[str, TextModelConfig], health: HealthConfig = _HEALTH
) -> AsyncIterator[Upstreams]:
    """The models of the configuration, with a look at each of their servers behind us and more to come.

    Raises:
        ConfigInvalid: A URL, a file of certificates or a tokenizer cannot be used.
    """
    models = {name: model for name, model in models.items() if model.upstreams}
    if not models:
        yield Upstreams({}, [])
        return
    # A gateway with engines of its own alone starts sooner without an HTTP client.
    import aiohttp

    from maitred.replica.upstream.probe import Probe

    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                # As many connections as dispatch lets requests go.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_OPEN_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"user-agent": f"maitred/{__version__}"},
                trust_env=False,
            )
        )
        served: list[TextModel] = []
        servers: dict[str, list[Upstream]] = {}
        for name, config in models.items():
            peers = Peers(health.outliers, [])
            servers[name] = [_upstream(upstream, name, config, session, health, peers) for upstream in config.upstreams]
            for upstream in servers[name]:
                await stack.enter_async_context(running(Probe(upstream).run(), f"probe of {upstream.name}"))
            served.append(TextModel(name, servers[name], _tokenizer(config), reprompts=config.reprompts))
        yield Upstreams(servers, served)


def _upstream(
    config: UpstreamConfig,
    name: str,
    model: TextModelConfig,
    session: "aiohttp.ClientSession",
    health: HealthConfig,
    peers: Peers,
) -> "Upstream":
    from maitred.replica.upstream.server import Upstream

    try:
        return Upstream(
            config,
            name,
            session,
            context_tokens=model.context_tokens,
            max_choices=model.max_choices,
            health=health,
            peers=peers,
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(f"The certificates in {config.ca_file} cannot be used: {error}.") from error


def _tokenizer(config: TextModelConfig) -> Tokenizer | None:
    if config.tokenizer is None:
        return None
    path = Path(config.tokenizer)
    return Tokenizer.load(path.parent if path.name == "tokenizer.json" else path)
