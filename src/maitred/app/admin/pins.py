"""Prefixes that an operator keeps in the KV caches of a model's engines, whoever else needs the room.

A pin is computed like a request: it waits for its turn in each engine, in the tenant's share, and then its blocks stay.
It is not billed. What an engine holds is gone when it is lost, unloaded or sleeps, and is not computed again by itself.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from maitred.app.request.prompts import NamedTokenizer, tokens_of
from maitred.core.answer import Conversation, Prompt
from maitred.core.clock import Clock
from maitred.core.errors import CallerError, Conflict, InvalidRequest, ReplicaLost, ReplicaUnavailable, ResourceNotFound
from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.ids import new_object_id
from maitred.core.request import EngineRequest, PinRequest, SamplingParams
from maitred.replica.engine.client import EngineClient
from maitred.text.tokenizer import Tokenizer
from maitred.wire.admin.requests import PinPrefix
from maitred.wire.admin.responses import PinBody
from maitred.wire.admin.times import iso_of

_COMPUTED_S = 120.0
"""For an engine to compute a prefix, behind whatever else it has to do."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PinnableModel:
    """A model whose engines can keep prefixes.

    Attributes:
        tokenizer: Its own.
        links: Replica -> its engine.
    """

    tokenizer: Tokenizer
    links: Mapping[str, EngineClient]


@dataclass(slots=True)
class _Pinned:
    id: str
    model: str
    tenant: str
    name: str
    tokens: int
    until_wall_s: float
    epochs: dict[str, int] = field(default_factory=dict)
    """Replica -> which life of its engine holds it."""


class PinAdmin:
    """Implements `maitred.api.admin.pins.PinService`.

    Args:
        models: By their names.
        clock: The time.
    """

    def __init__(self, models: Mapping[str, PinnableModel], clock: Clock) -> None:
        self._models = models
        self._clock = clock
        self._pins: dict[str, _Pinned] = {}
        for name, model in models.items():
            for replica, link in model.links.items():
                link.watch(partial(self._heard, name, replica, link))

    def all(self) -> list[PinBody]:
        """Those whose time is not over."""
        now_s = self._clock.wall_s()
        self._pins = {id_: pin for id_, pin in self._pins.items() if pin.until_wall_s > now_s}
        return [self._body(pin) for pin in self._pins.values()]

    async def pin(self, wish: PinPrefix, own_organisation: str) -> PinBody:
        """Has every engine of the model that is there compute a prefix, and keep it.

        Raises:
            InvalidRequest: There is nothing to pin in it, or more than may be pinned.
            ResourceNotFound: No engine of ours runs a model of that name.
            Conflict: None of its engines is there.
        """
        model = self._models.get(wish.model)
        if model is None:
            raise ResourceNotFound(
                f"No engine of maitred's runs a model called {wish.model[:200]!r}. Its name is the one in /v1/models.",
                param="model",
            )
        tenant, tokens = wish.tenant or own_organisation, await _tokens(model, wish)
        there = {replica: link for replica, link in model.links.items() if link.ready}
        if not there:
            raise Conflict(f"No engine runs {wish.model} now, so there is no cache to pin in. Load the model first.")
        id_ = new_object_id("pin")
        request = EngineRequest(
            id_,
            tokens,
            SamplingParams(max_tokens=1, seed=0, temperature=0.0),
            cache_scope=tenant,
            flow=Flow((FlowLevel(tenant),), PriorityClass.STANDARD),
            pin=PinRequest(wish.name or id_, wish.ttl_s),
        )
        pinned = _Pinned(id_, wish.model, tenant, wish.name or id_, len(tokens), self._clock.wall_s() + wish.ttl_s)
        for old in [one for one in self._pins.values() if _same(one, pinned)]:
            del self._pins[old.id]  # the engines have replaced it
        faults = await asyncio.gather(*(self._compute(link, request) for link in there.values()))
        for (replica, link), fault in zip(there.items(), faults, strict=True):
            if fault is None and link.ready:
                pinned.epochs[replica] = link.epoch
        if not pinned.epochs:
            raise next(fault for fault in faults if fault is not None)
        self._pins[id_] = pinned
        _log.info("A prefix of %d tokens is pinned for %s in %s.", len(tokens), tenant, wish.model)
        return self._body(pinned)

    def unpin(self, id_: str) -> None:
        """Lets it go.

        Raises:
            ResourceNotFound: There is none of that id.
        """
        pin = self._pins.pop(id_, None)
        if pin is None:
            raise ResourceNotFound(
                f"There is no pin {id_[:200]!r}. GET /admin/v1/pins lists those that are.", param="id"
            )
        for link in self._models[pin.model].links.values():
            link.unpin(pin.tenant, pin.name)

    async def _compute(self, link: EngineClient, request: EngineRequest) -> Exception | None:
        """Why it could not be; None: it was."""
        try:
            async with asyncio.timeout(_COMPUTED_S), link.generate(request) as stream:
                async for _ in stream:
                    pass
        except CallerError as refusal:
            return InvalidRequest(refusal.message, param="prompt")
        except (ReplicaUnavailable, ReplicaLost) as failure:
            return failure
        except TimeoutError:
            return Conflict(f"The prefix was not computed within {_COMPUTED_S:g} s. Pin it when less is going on.")
        return None

    def _heard(self, model: str, replica: str, link: EngineClient) -> None:
        """An engine that sleeps, or is another one, holds nothing of ours."""
        if not self._pins:
            return
        for pin in self._pins.values():
            holds = link.ready and not link.asleep and link.epoch == pin.epochs.get(replica)
            if pin.model == model and not holds:
                pin.epochs.pop(replica, None)

    def _body(self, pin: _Pinned) -> PinBody:
        return PinBody(
            id=pin.id,
            model=pin.model,
            tenant=pin.tenant,
            name=pin.name,
            tokens=pin.tokens,
            expires_at=iso_of(pin.until_wall_s),
            replicas=list(pin.epochs),
        )


def _same(one: _Pinned, other: _Pinned) -> bool:
    return (one.model, one.tenant, one.name) == (other.model, other.tenant, other.name)


async def _tokens(model: PinnableModel, wish: PinPrefix) -> list[int]:
    if (wish.prompt is None) == (wish.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    prompt: Prompt
    if wish.messages is not None:
        prompt = Conversation(
            [message.for_template() for message in wish.messages],
            add_generation_prompt=False,
            tools=wish.tools or [],
            template_arguments=wish.chat_template_kwargs or {},
        )
    else:
        assert wish.prompt is not None
        prompt = wish.prompt
    (tokens,) = await tokens_of(NamedTokenizer(wish.model, model.tokenizer), [prompt])
    if isinstance(prompt, list) and not all(0 <= token < model.tokenizer.vocab_size for token in tokens):
        raise InvalidRequest(f"Token ids run from 0 to {model.tokenizer.vocab_size - 1}.", param="prompt")
    return tokens
