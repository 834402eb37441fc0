"""Serve application that streams tokens as Ray Serve's own applications for language models do.

::

    client --HTTP--> proxy of Serve --> Completions (ingress) --handle--> StreamedEngine --> engine process

A deployment owns the engine, and another one speaks the API; tokens come through a handle of Serve. The engine, its
client, the tokenizer and the detokenizer are maitred's, so that only the way of the tokens differs. There are no keys,
limits, queues or ledgers, and no batching of tokens, whose 50 ms Ray's own applications add.
"""

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.request import EngineRequest, SamplingParams
from maitred.fleet.ray.arguments import ApplicationArguments, make_engine, read_arguments
from maitred.text.tokenizer import Detokenizer, Tokenizer

_AT_ONCE = 1000
"""Requests that a deployment takes at a time: as many as may come."""


class StreamedEngine:
    """Owner of an engine process, which hands its tokens on through a handle.

    Args:
        arguments: Arguments as of the application with our engines.
    """

    async def __init__(self, arguments: ApplicationArguments) -> None:  # type: ignore[misc]
        self._numbers = itertools.count()
        self._engine = make_engine(arguments, ray.util.get_node_ip_address(), arguments.first_port)
        await self._engine.__aenter__()
        await self._engine.wait_started()

    async def tokens(self, prompt: list[int], max_tokens: int) -> AsyncIterator[list[int]]:
        """Yields the tokens of a greedy answer, step by step."""
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        request = EngineRequest(f"request-{next(self._numbers)}", prompt, sampling)
        async with self._engine.client.generate(request) as stream:
            async for deltas in stream:
                for delta in deltas:
                    yield delta.tokens

    async def __del__(self) -> None:
        """Stops the engine."""
        await self._engine.__aexit__(None, None, None)


class Completions:
    """Ingress that answers completions with server-sent events.

    Args:
        engine: Handle of the deployment with the engine.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - a handle of Serve
        self._engine = engine.options(stream=True)
        self._tokenizer = Tokenizer.load(BUNDLED_MODEL, cache_bytes=1 << 20)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Answers one request."""
        body = await request.json()
        prompt = self._tokenizer.encode(body["prompt"], add_special_tokens=True)
        return StreamingResponse(self._events(prompt, body["max_tokens"]), media_type="text/event-stream")

    async def _events(self, prompt: list[int], max_tokens: int) -> AsyncIterator[str]:
        detokenizer = Detokenizer(self._tokenizer, prompt)
        async for tokens in self._engine.tokens.remote(prompt, max_tokens):
            text = detokenizer.push(tokens)
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"
        yield "data: [DONE]\n\n"


def app(arguments: dict[str, Any]) -> serve.Application:
    """Builds the application from arguments as of the application with our engines."""
    read = read_arguments(arguments)
    options: dict[str, Any] = {"max_ongoing_requests": _AT_ONCE, "ray_actor_options": {"num_cpus": 0.5}}
    engine = serve.deployment(StreamedEngine).options(**options).bind(read)
    return serve.deployment(Completions).options(**options).bind(engine)
