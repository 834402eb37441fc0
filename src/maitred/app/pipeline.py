"""The spine: one request from the model's name to its last token.

`Pipeline.answer` names the stages in order. Each is called once per request, and nothing upstream is reached for from
downstream. The pipeline speaks in tokens and parts; which API the request came through is not its business.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import msgspec

from maitred.admission.admission import Admission
from maitred.admission.grant import Grant
from maitred.admission.work import Work
from maitred.app.choice import Choice
from maitred.app.limits import check_fits, check_sampling, check_size
from maitred.app.merge import merged
from maitred.app.prompts import tokens_of
from maitred.core.answer import Answer, Ask, Outcome, Part, Place, Prompt, Standing, Tally
from maitred.core.clock import Clock, SystemClock
from maitred.core.errors import InvalidRequest, ReplicaLost, ResourceNotFound
from maitred.core.ports import ModelCard, TokenStream
from maitred.core.request import Delta, FinishReason, Request
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.routing.catalog import Catalog


def draw_seed() -> int:
    """A seed that nobody can guess, for requests that name none."""
    return secrets.randbits(63)


class Pipeline:
    """Takes requests through the stages. Implements `maitred.core.answer.Answering`.

    Args:
        catalog: What is served.
        admission: Who may run, and how long answers may be.
        clock: For the times in the tally.
        draw_seed: Makes a seed where the caller names none.
        max_choices: Largest `n`, if the replica would take more.
    """

    def __init__(
        self,
        catalog: Catalog,
        admission: Admission,
        clock: Clock | None = None,
        *,
        draw_seed: Callable[[], int] = draw_seed,
        max_choices: int = 128,
    ) -> None:
        self._catalog = catalog
        self._admission = admission
        self._clock = clock or SystemClock()
        self._draw_seed = draw_seed
        self._max_choices = max_choices

    @asynccontextmanager
    async def answer(self, ask: Ask, tally: Tally) -> AsyncIterator[Answer]:
        """See `Answering.answer`."""
        # Who serves it?
        principal = tally.principal or ANONYMOUS
        model = self._catalog.resolve(ask.model, principal)
        card = model.card()
        tally.model = model.name
        # Can it do what is asked?
        check_sampling(card, ask, self._max_choices)
        check_size(card, model.tokenizer, ask)
        # What does it read?
        prompts = await tokens_of(model, ask.prompts)
        # Does that fit the window?
        rooms = [check_fits(card, prompt, ask) for prompt in prompts]
        tally.prompt_tokens = sum(map(len, prompts))
        # May the caller have it, and how long may it be? Leaving the stack, however that comes about, cancels what has
        # not finished, and then settles what has not been settled.
        work = _work(principal, ask, tally, prompts, max(rooms))
        async with self._admission.admit(work) as grant, AsyncExitStack() as running:
            # What exactly is to be generated?
            scope = _cache_scope(principal)
            requests = [
                self._request(f"{grant.lease}-{index}", ask, prompt, min(room, grant.max_tokens), scope)
                for index, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))
            ]
            choices = [
                Choice(model.tokenizer, prompt, ask, ends=card.eos_token_ids)
                for prompt in prompts
                for _ in range(ask.sampling.n)
            ]
            # Run it.
            grant.replica = model.place
            streams = [await running.enter_async_context(model.replica.generate(request)) for request in requests]
            batches = await running.enter_async_context(merged(streams))
            yield _Answer(batches, streams, choices, tally, self._clock, grant)

    def _request(self, name: str, ask: Ask, prompt: list[int], max_tokens: int, cache_scope: str) -> Request:
        """The request as scheduler and engine see it, under an id that leads to its line in the ledger."""
        seed = self._draw_seed() if ask.seed is None else ask.seed
        return Request(
            id=name,  # a client may repeat its request id; at the replica it must be unique
            prompt=prompt,
            sampling=msgspec.structs.replace(ask.sampling, max_tokens=max_tokens, seed=seed),
            cache_scope=cache_scope,
        )

    async def tokenize(
        self, principal: Principal, model: str, prompt: Prompt, *, add_special_tokens: bool | None
    ) -> list[int]:
        """See `Answering.tokenize`."""
        served = self._catalog.resolve(model, principal)
        (tokens,) = await tokens_of(served, [prompt], add_special_tokens=add_special_tokens)
        return tokens

    def detokenize(self, principal: Principal, model: str, tokens: Sequence[int]) -> str:
        """See `Answering.detokenize`."""
        tokenizer = self._catalog.resolve(model, principal).tokenizer
        if not all(0 <= token < tokenizer.vocab_size for token in tokens):
            raise InvalidRequest(f"Token ids run from 0 to {tokenizer.vocab_size - 1}.", param="tokens")
        return tokenizer.decode(tokens, skip_special_tokens=False)

    def models(self, principal: Principal) -> Sequence[str]:
        """See `Answering.models`."""
        return self._catalog.open_to(principal)

    def card(self, principal: Principal, model: str) -> ModelCard:
        """See `Answering.card`."""
        return self._catalog.resolve(model, principal).card()

    async def standing(self, tally: Tally) -> Standing | None:
        """See `Answering.standing`."""
        if tally.principal is None:
            return None
        return await self._admission.peek(tally.principal, tally.model)

    def place(self, principal: Principal, request_id: str) -> Place:
        """See `Answering.place`."""
        raise ResourceNotFound("No request of that id waits in the queue. It may run already, or have ended.")

    def ready(self) -> bool:
        """See `Answering.ready`."""
        return all(model.ready() for model in self._catalog)


class _Answer:
    """Turns batches of deltas into lists of parts, writes what it sees into the tally, and settles before the end."""

    def __init__(
        self,
        batches: AsyncIterator[tuple[int, list[Delta]]],
        streams: Sequence[TokenStream],
        choices: Sequence[Choice],
        tally: Tally,
        clock: Clock,
        grant: Grant,
    ) -> None:
        self._batches = batches
        self._streams = streams
        self._choices = choices
        self._per_stream = len(choices) // len(streams)
        self._unfinished = len(choices)
        self._tally = tally
        self._clock = clock
        self._grant = grant

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Part]:
        if not self._unfinished:
            raise StopAsyncIteration
        try:
            source, deltas = await anext(self._batches)
        except StopAsyncIteration:
            raise ReplicaLost from None
        now_s = self._clock.monotonic_s()
        touched: dict[int, Choice] = {}
        for delta in deltas:
            index = source * self._per_stream + delta.index
            choice = touched[index] = self._choices[index]
            if choice.finish is None:
                self._take(source, choice, delta)
        self._time(touched.values(), now_s)
        if not self._unfinished:
            # Nobody may see the end of an answer that could still be lost to the ledger.
            await self._grant.settle(self._tally.usage, Outcome.FINISHED)
        return [part for index, choice in touched.items() if (part := choice.part(index)) is not None]

    def _take(self, source: int, choice: Choice, delta: Delta) -> None:
        if delta.finish is FinishReason.CANCELLED:
            raise ReplicaLost("The replica gave up the answer before it was complete. Send the request again.")
        before = choice.tokens
        choice.take(delta)
        self._tally.completion_tokens += choice.tokens - before
        if delta.index == 0:
            # The further choices of a prompt find it in the cache because of the first: no merit of an earlier request.
            self._tally.cached_tokens += delta.cached_tokens
        if choice.finish is not None:
            self._unfinished -= 1
            if delta.finish is None:
                # A stop string came up, of which the replica knows nothing.
                self._streams[source].cancel(delta.index)

    def _time(self, choices: Iterable[Choice], now_s: float) -> None:
        if self._tally.first_token_s is None:
            self._tally.first_token_s = now_s
        for choice in choices:
            if choice.last_token_s is not None:
                self._tally.gaps_s.append(now_s - choice.last_token_s)
            choice.last_token_s = now_s


def _work(principal: Principal, ask: Ask, tally: Tally, prompts: Sequence[list[int]], room: int) -> Work:
    """The request as admission sees it."""
    return Work(
        principal=principal,
        request_id=tally.request_id,
        route=tally.route,
        model=tally.model,
        prompt_tokens=tally.prompt_tokens,
        longest_prompt=max(map(len, prompts)),
        max_tokens=ask.max_tokens,
        min_tokens=ask.sampling.min_tokens,
        window_left=room,
        choices=len(prompts) * ask.sampling.n,
        max_tokens_param=ask.max_tokens_param,
        prompt_param=ask.prompt_param,
        tally=tally,
    )


def _cache_scope(principal: Principal) -> str:
    """Who may share KV blocks with this request: the teams of one organisation. Never something that clients choose."""
    return principal.tenants[-1]
