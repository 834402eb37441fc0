"""Generations of the configuration: the parts made from one configuration, and their replacement.

    clients -> HttpServer -> the current generation -> queues, counters, stores, connections
                     `-> earlier generations ----'   (these stay, and are reconfigured)

A *generation* is everything that is made from a configuration and holds no state: routes, names, prices, ladders,
pipeline. A generation is made as a whole and replaces the previous one in one assignment, so a request never sees parts
of both. A request belongs to the generation in which it began, until its end. Objects that only earlier generations
use, such as a server that is not configured any more, are released when the last request of these generations has
ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from maitred.api.app import GatewayApp
from maitred.app.models.upstreams import UpstreamModels
from maitred.app.request.flow_control import LocalFlowController
from maitred.config.tree import Config
from maitred.core.context import RequestObserver


@dataclass(eq=False, slots=True)
class ConfigGeneration:
    """Generation of the configuration: the application and what it uses.

    Attributes:
        config: The configuration of the generation.
        app: The ASGI application.
        upstream_models: The models of upstream servers in this generation.
        models: The names of all models with a queue in this generation.
        flow_controller: Decides whether and when requests run.
        observers: Observers that get every ended request.
    """

    config: Config
    app: GatewayApp
    upstream_models: UpstreamModels
    models: Sequence[str]
    flow_controller: LocalFlowController
    observers: Sequence[RequestObserver]


class GenerationSwitch:
    """Switch between generations: the current one, and earlier ones that still have requests.

    Args:
        first: The first generation.
        retire: Called with the remaining generations whenever one has ended.
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
        """Number of generations in use: the current one, and earlier ones that still have requests."""
        return len(self._alive)

    def switch_to(self, generation: ConfigGeneration) -> None:
        """Makes this generation current: new requests belong to it."""
        before, self._current = self._current, generation
        self._alive.append(generation)
        before.app.on_idle(partial(self._on_end, before))

    def _on_end(self, generation: ConfigGeneration) -> None:
        self._alive.remove(generation)
        self._retire(self._alive)
