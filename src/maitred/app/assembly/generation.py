"""Generations of the configuration: all that is made from one, and how one replaces the other.

    clients -> GenerationSwitch -> the current generation -> queues, counters, stores, connections
                        `-> those before it ---'   (which stay, and are told of new settings)

A *generation* is everything that is made from a configuration and holds no state: routes, names, prices, ladders,
pipeline. It is made as a whole and takes the place of the one before it in one assignment, so no request ever sees a
part of each. A request belongs to the generation that it began under, to its end. What only past generations use, such
as a server that is not named any more, is let go of when the last of their requests has ended.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from maitred.api.app import GatewayApp
from maitred.api.exchange import Receive, Scope, Send
from maitred.app.models.upstreams import UpstreamModels
from maitred.app.request.flow_control import LocalFlowController
from maitred.config.tree import Config
from maitred.core.context import RequestObserver


@dataclass(eq=False, slots=True)
class ConfigGeneration:
    """Generation of the configuration: the application and what it uses.

    Attributes:
        config: What it was made from.
        app: Takes requests.
        upstream_models: What servers of others run under it.
        models: The names of all that have a queue under it.
        flow_controller: Decides on requests.
        observers: Told of every one that has ended.
    """

    config: Config
    app: GatewayApp
    upstream_models: UpstreamModels
    models: Sequence[str]
    flow_controller: LocalFlowController
    observers: Sequence[RequestObserver]


class GenerationSwitch:
    """The ASGI application: hands each request to the generation that is current when it comes.

    Args:
        first: The first generation.
        retire: Told which ones are left whenever one is over.
    """

    def __init__(self, first: ConfigGeneration, retire: Callable[[Sequence[ConfigGeneration]], None]) -> None:
        self._current = first
        self._alive = [first]
        self._retire = retire

    @property
    def current(self) -> ConfigGeneration:
        """Generation that new requests begin under."""
        return self._current

    @property
    def alive(self) -> int:
        """Number of generations: the current one, and those before it that have requests."""
        return len(self._alive)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Hands a request to the current generation; the entry point of ASGI."""
        return self._current.app(scope, receive, send)

    def switch_to(self, generation: ConfigGeneration) -> None:
        """Requests that come from now on are this one's."""
        before, self._current = self._current, generation
        self._alive.append(generation)
        before.app.on_idle(partial(self._on_end, before))

    def _on_end(self, generation: ConfigGeneration) -> None:
        self._alive.remove(generation)
        self._retire(self._alive)
