"""Queues of models that generate: made with a new model, closed when its last user has ended.

A queue is state: A queue holds state: waiting requests, running requests and learnt values. So each model keeps its
queue, found by the model's name, through all changes of the configuration.
"""

import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from maitred.admission.policy.ladder import DegradationLadder
from maitred.app.models.router import home_region, untold_region
from maitred.app.runtime import KeyedTasks
from maitred.config.tree import Config
from maitred.core.clock import Clock
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import AnyEndpoint
from maitred.fleet.sleepable_replica import SleepableReplica
from maitred.replica.engine.client import EngineClient
from maitred.routing.balance.balancer import Balancer
from maitred.routing.prefix import PrefixCacheBalancer

Endpoints = Mapping[str, Sequence[AnyEndpoint]]
"""Model -> the endpoints for its requests."""


class ModelQueues:
    """Queues of all models, of those that generate and of the encoders.

    Args:
        encoders: Model -> its queue; these queues never change, and other code runs them.
        clock: The clock.
        chores: Runs the background tasks of the other queues.
        answered: Called with the time in seconds to every first token.
        wanted: Called with a model whose replica should be loaded, because a request could not wait for it.

    Attributes:
        all: Model -> its queue at present. The mapping object is always the same.
    """

    def __init__(
        self,
        encoders: Mapping[str, Dispatcher],
        clock: Clock,
        chores: KeyedTasks[Dispatcher],
        answered: Callable[[float], None],
        wanted: Callable[[str], None],
    ) -> None:
        self.all = dict(encoders)
        self._encoders = encoders
        self._clock = clock
        self._tasks = chores
        self._on_first_token = answered
        self._on_wanted = wanted
        self._living: dict[str, Dispatcher] = {}
        """Dispatchers by model; they include those of models that are not served any more but still in use."""
        self._balancers: dict[str, PrefixCacheBalancer] = {}
        self._links: dict[str, dict[str, EngineClient]] = {}
        """Model -> its own engines whose caches are followed, by replica."""
        self._config = Config()
        self._overflowing: set[str] = set()
        """Models whose requests may overflow to another."""

    def reconfigure(self, config: Config, endpoints: Endpoints, ladders: Mapping[str, DegradationLadder]) -> None:
        """Serves these models with these settings from now on. Waiting and running requests continue."""
        for dispatcher in self._encoders.values():
            dispatcher.reconfigure(
                [endpoint_state.endpoint for endpoint_state in dispatcher.core.endpoint_states], config.dispatch, None
            )
        for name in [name for name in self.all if name not in endpoints and name not in self._encoders]:
            del self.all[name]
        self._config = config
        self._overflowing = {name for name, ladder in ladders.items() if ladder.overflow_to is not None}
        for name, of_model in endpoints.items():
            if name in self._living:
                self.set_endpoints(name, of_model)
            else:
                self._living[name] = Dispatcher(
                    *(name, self._in_regions(name, of_model), config.dispatch, self._clock),
                    balancer=self._balancer(name, of_model),
                    region=home_region(name, config),
                    on_wanted=partial(self._on_wanted, name),
                    notify_first_token=self._on_first_token,
                )
            self.all[name] = self._living[name]
        self._tasks.begin(self._living.values())

    def set_endpoints(self, name: str, endpoints: Sequence[AnyEndpoint]) -> None:
        """Sets the endpoints of a model. Its waiting and running requests continue."""
        dispatcher = self._living[name]
        dispatcher.core.region = home_region(name, self._config)
        dispatcher.reconfigure(
            self._in_regions(name, endpoints), self._config.dispatch, self._balancer(name, endpoints)
        )

    def _in_regions(self, name: str, endpoints: Sequence[AnyEndpoint]) -> Sequence[AnyEndpoint]:
        """Returns the endpoints with the region that those of a model have while they tell none."""
        region = untold_region(name, self._config)
        if region is None:
            return endpoints
        return [endpoint if endpoint.region else replace(endpoint, region=region) for endpoint in endpoints]

    def retire(self, in_use: Iterable[str]) -> None:
        """Closes the queues of all models except these."""
        kept = set(in_use)
        for name in [name for name in self._living if name not in kept]:
            del self._living[name]
            self._balancers.pop(name, None)
            self._links.pop(name, None)
        self._tasks.only(self._living.values())

    def _balancer(self, name: str, endpoints: Sequence[AnyEndpoint]) -> PrefixCacheBalancer | None:
        """Returns the balancer that chooses a replica and tracks the prefix caches; None: none is needed.

        One alone is followed if it tells: A single replica also gets a balancer if it reports its cache: exact reports
        make estimates of its prefix hits unnecessary.
        """
        config = self._config
        balancer = Balancer(config.routing.balance, config.dispatch.service.weights, random.random)
        placement = self._balancers.get(name)
        links = {endpoint.name: link for endpoint in endpoints if (link := _link_of(endpoint)) is not None}
        if placement is not None:
            placement.reconfigure(balancer)
        elif len(endpoints) == 1 and name not in self._overflowing and not links:
            return None
        else:
            placement = self._balancers[name] = PrefixCacheBalancer(balancer)
        followed = self._links.setdefault(name, {})
        for replica_name in [replica_name for replica_name in followed if replica_name not in links]:
            del followed[replica_name]
            placement.remove_replica(replica_name)
        for replica_name, link in links.items():
            if followed.get(replica_name) is not link:
                followed[replica_name] = link
                link.subscribe_blocks(partial(placement.on_block_update, replica_name))
        return placement


def _link_of(endpoint: AnyEndpoint) -> EngineClient | None:
    """Returns the client of an own engine, which reports its cache; None for other replicas."""
    replica: object = endpoint.replica
    return replica.client if isinstance(replica, SleepableReplica) else None


@asynccontextmanager
async def open_queues(
    encoders: Mapping[str, Dispatcher],
    clock: Clock,
    answered: Callable[[float], None],
    wanted: Callable[[str], None],
) -> AsyncIterator[ModelQueues]:
    """Opens the queues, at first those of the encoders only; the end of the context closes all of them."""
    async with KeyedTasks(Dispatcher.run, lambda dispatcher: f"dispatch of {dispatcher.model}") as chores:
        yield ModelQueues(encoders, clock, chores, answered, wanted=wanted)
