"""Prefixes that an operator pins in the KV caches of a model's engines, whatever other requests need the blocks.

A pin is computed like a request: it waits for its turn in each engine, in the tenant's share, and then its blocks stay.
A pin is not billed. When an engine is lost, unloaded or put to sleep, its pinned blocks are gone and are not computed
again automatically.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from maitred.app.request.tokenized import NamedTokenizer, tokenize_prompts
from maitred.core.clock import Clock
from maitred.core.errors import CallerError, Conflict, InvalidRequest, ReplicaLost, ReplicaUnavailable, ResourceNotFound
from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.ids import new_object_id
from maitred.core.inference import Conversation, Prompt
from maitred.core.request import EngineRequest, PinRequest, SamplingParams
from maitred.replica.engine.client import EngineClient
from maitred.text.tokenizer import Tokenizer
from maitred.wire.admin.requests import PinPrefix
from maitred.wire.admin.responses import PinBody
from maitred.wire.admin.times import to_iso

_COMPUTE_TIMEOUT_S = 120.0
"""How long an engine may take to compute a prefix, behind its other work."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PinnableModel:
    """A model whose engines can pin prefixes.

    Attributes:
        tokenizer: The model's tokenizer.
        clients: Replica -> the client of its engine.
    """

    tokenizer: Tokenizer
    clients: Mapping[str, EngineClient]


@dataclass(slots=True)
class _Pin:
    id: str
    model: str
    tenant: str
    name: str
    tokens: int
    expires_wall_s: float
    epochs: dict[str, int] = field(default_factory=dict)
    """Replica -> the epoch of the engine that holds the prefix."""


class PinAdmin:
    """Pins prefixes in engines. Implements `maitred.api.admin.service.PinService`.

    Args:
        models: Name -> the model.
        clock: The clock.
    """

    def __init__(self, models: Mapping[str, PinnableModel], clock: Clock) -> None:
        self._models = models
        self._clock = clock
        self._pins: dict[str, _Pin] = {}

    def watch(self, model: str, replica: str, client: EngineClient) -> None:
        """Watches an engine of a model from now on, for pins that it loses."""
        client.on_change(partial(self._on_report, model, replica, client))

    def all(self) -> list[PinBody]:
        """Lists the pins that have not expired."""
        now_s = self._clock.wall_s()
        self._pins = {id_: pin for id_, pin in self._pins.items() if pin.expires_wall_s > now_s}
        return [self._body(pin) for pin in self._pins.values()]

    async def pin(self, pin_prefix: PinPrefix, own_organisation: str) -> PinBody:
        """Has every connected engine of the model compute a prefix, and pin it.

        Raises:
            InvalidRequest: The prefix is empty, or larger than what may be pinned.
            ResourceNotFound: No engine of this gateway runs a model of that name.
            Conflict: None of the model's engines is connected.
        """
        model = self._models.get(pin_prefix.model)
        if model is None:
            raise ResourceNotFound(
                f"No engine of maitred's runs a model called {pin_prefix.model[:200]!r}. Its name is the one in "
                "/v1/models.",
                param="model",
            )
        tenant, tokens = pin_prefix.tenant or own_organisation, await _tokenize(model, pin_prefix)
        ready_clients = {replica: client for replica, client in model.clients.items() if client.is_ready}
        if not ready_clients:
            raise Conflict(
                f"No engine runs {pin_prefix.model} now, so there is no cache to pin in. Load the model first."
            )
        id_ = new_object_id("pin")
        request = EngineRequest(
            id_,
            tokens,
            SamplingParams(max_tokens=1, seed=0, temperature=0.0),
            cache_scope=tenant,
            flow=Flow((FlowLevel(tenant),), PriorityClass.STANDARD),
            pin=PinRequest(pin_prefix.name or id_, pin_prefix.ttl_s),
        )
        pinned = _Pin(
            id=id_,
            model=pin_prefix.model,
            tenant=tenant,
            name=pin_prefix.name or id_,
            tokens=len(tokens),
            expires_wall_s=self._clock.wall_s() + pin_prefix.ttl_s,
        )
        for old in [_pinned for _pinned in self._pins.values() if _has_same_name(_pinned, pinned)]:
            del self._pins[old.id]  # the engines have replaced it
        errors = await asyncio.gather(*(self._compute(client, request) for client in ready_clients.values()))
        for (replica, client), error in zip(ready_clients.items(), errors, strict=True):
            if error is None and client.is_ready:
                pinned.epochs[replica] = client.epoch
        if not pinned.epochs:
            raise next(error for error in errors if error is not None)
        self._pins[id_] = pinned
        _log.info("A prefix of %d tokens is pinned for %s in %s.", len(tokens), tenant, pin_prefix.model)
        return self._body(pinned)

    def unpin(self, id_: str) -> None:
        """Removes a pin from all engines.

        Raises:
            ResourceNotFound: There is no pin of that id.
        """
        pin = self._pins.pop(id_, None)
        if pin is None:
            raise ResourceNotFound(
                f"There is no pin {id_[:200]!r}. GET /admin/v1/pins lists those that are.", param="id"
            )
        for client in self._models[pin.model].clients.values():
            client.unpin(pin.tenant, pin.name)

    async def _compute(self, client: EngineClient, request: EngineRequest) -> Exception | None:
        """Computes the prefix in one engine; returns the error if that fails, and None otherwise."""
        try:
            async with asyncio.timeout(_COMPUTE_TIMEOUT_S), client.generate(request) as stream:
                async for _ in stream:
                    pass
        except CallerError as rejection:
            return InvalidRequest(rejection.message, param="prompt")
        except (ReplicaUnavailable, ReplicaLost) as failure:
            return failure
        except TimeoutError:
            return Conflict(
                f"The prefix was not computed within {_COMPUTE_TIMEOUT_S:g} s. Pin it when less is going on."
            )
        return None

    def _on_report(self, model: str, replica: str, client: EngineClient) -> None:
        """Removes an engine that sleeps or was restarted from the pins, since its prefixes are gone."""
        if not self._pins:
            return
        for pin in self._pins.values():
            is_held = client.is_ready and not client.is_asleep and client.epoch == pin.epochs.get(replica)
            if pin.model == model and not is_held:
                pin.epochs.pop(replica, None)

    def _body(self, pin: _Pin) -> PinBody:
        return PinBody(
            id=pin.id,
            model=pin.model,
            tenant=pin.tenant,
            name=pin.name,
            tokens=pin.tokens,
            expires_at=to_iso(pin.expires_wall_s),
            replicas=list(pin.epochs),
        )


def _has_same_name(pin: _Pin, other: _Pin) -> bool:
    return (pin.model, pin.tenant, pin.name) == (other.model, other.tenant, other.name)


async def _tokenize(model: PinnableModel, pin_prefix: PinPrefix) -> list[int]:
    if (pin_prefix.prompt is None) == (pin_prefix.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    prompt: Prompt
    if pin_prefix.messages is not None:
        prompt = Conversation(
            [message.for_template() for message in pin_prefix.messages],
            add_generation_prompt=False,
            tools=pin_prefix.tools or [],
            template_arguments=pin_prefix.chat_template_kwargs or {},
        )
    else:
        assert pin_prefix.prompt is not None
        prompt = pin_prefix.prompt
    (tokens,) = await tokenize_prompts(NamedTokenizer(pin_prefix.model, model.tokenizer), [prompt])
    if isinstance(prompt, list) and not all(0 <= token < model.tokenizer.vocab_size for token in tokens):
        raise InvalidRequest(f"Token ids run from 0 to {model.tokenizer.vocab_size - 1}.", param="prompt")
    return tokens
