"""Server of the OpenAI API whose answer to a conversation is looked up, and which counts what it computes."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

Answer = Callable[[Sequence[dict[str, Any]], str], str]
"""Answer to the messages of a conversation, and to the ``user`` that the request names."""


class AnsweringUpstream:
    """Server on a free port. A token is a word.

    Args:
        answer: Makes the answers.

    Attributes:
        url: Its address, with the path of the API.
        requests: Answered requests.
        tokens: Tokens of their prompts and answers.
    """

    def __init__(self, answer: Answer) -> None:
        self.url = ""
        self.requests = 0
        self.tokens = 0
        self._answer = answer

    async def __aenter__(self) -> "AnsweringUpstream":
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "intents", "max_model_len": 8_192}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        text = self._answer(asked["messages"], asked.get("user", ""))
        prompt = sum(len(str(message.get("content") or "").split()) for message in asked["messages"])
        output = len(text.split())
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        self.requests += 1
        self.tokens += prompt + output
        head = {"id": f"chat-{self.requests}", "created": 0, "model": asked["model"]}
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        choices = [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]
        end = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        head["object"] = "chat.completion.chunk"
        for event in ({"choices": choices}, {"choices": end}, {"choices": [], "usage": usage}):
            await response.write(b"data: " + json.dumps(head | event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
