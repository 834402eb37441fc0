"""The paths that official clients make of a base URL, and those of APIs that are not served."""

import anthropic
import openai
import pytest

from maitred.api.unsupported_path import ADVICE
from tests.support.gateway import MODEL, gateway

USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/", "/v1//"])
async def test_clients_reach_their_paths_by_whichever_base_url_people_write(base):
    async with gateway() as system:
        asking = {"model": MODEL, "messages": USER, "max_tokens": 4}
        async with openai.AsyncOpenAI(base_url=system.url + base, api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(**asking)
            assert answer.choices[0].message.content
            assert [model.id async for model in client.models.list()] == [MODEL]
        async with anthropic.AsyncAnthropic(base_url=system.url + base, api_key="none", max_retries=0) as other:
            assert (await other.messages.create(**asking)).content
        routes = {context.route for context in system.contexts}
        assert routes == {"/v1/chat/completions", "/v1/models", "/v1/messages"}


async def test_a_path_of_another_api_says_what_to_send_instead():
    async with gateway() as system:
        async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match=r"'/v1/audio/speech' here\. That is OpenAI's audio API"):
                await client.audio.speech.create(model=MODEL, voice="alloy", input="Hello")
            with pytest.raises(openai.NotFoundError, match="OpenAI's moderation"):
                await client.moderations.create(input="Hello")
        async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError, match="Anthropic's Message Batches") as raised:
                await client.messages.batches.list()
            assert raised.value.body["type"] == "error"
            assert raised.value.body["error"]["type"] == "not_found_error"
        described = (await system.client.get("/openapi.json")).json()["paths"]
        assert described.keys() >= {"/v1/chat/completions", "/v1/messages"}
        assert described.keys() & ADVICE.keys() == set()
