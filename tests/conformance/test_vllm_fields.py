"""Request fields of vLLM, asked for with the official `openai` client."""
# ruff: noqa: SIM117 - nested contexts say who lives within whom

from contextlib import asynccontextmanager

import openai
import pytest
import transformers

from maitred.config.tree import BUNDLED_MODEL
from maitred.testing.script import ScriptedAnswer
from maitred.text.tokenizer import Tokenizer
from tests.support.gateway import CARD, MODEL, TOKENIZER, gateway, tokens_of

EOS = 2
"""Token that ends a scripted answer; its text is that of the bundled vocabulary."""
TEXT = "Hello there, my friend. How are you?"
ANSWER = ScriptedAnswer(tokens=[*tokens_of(TEXT), EOS], cached_tokens=2)
USER = [{"role": "user", "content": "Hi"}]
BEGUN = [*USER, {"role": "assistant", "content": "The answer is"}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@asynccontextmanager
async def client_of(answers=(ANSWER,), **options):
    async with gateway(answers, **options) as system:
        async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
            yield client


async def chat(client, messages=USER, extra=None, **fields):
    return await client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra, **fields)


async def chunks_of(stream):
    return [chunk async for chunk in await stream]


@pytest.fixture(scope="module")
def oracle():
    return transformers.AutoTokenizer.from_pretrained(BUNDLED_MODEL)


async def test_chats_have_the_token_ids_of_prompt_and_choices():
    prompt = TOKENIZER.encode_conversation(USER)
    async with client_of() as client:
        whole = await chat(client, n=2, extra={"return_token_ids": True})
        assert whole.prompt_token_ids == prompt
        assert [choice.token_ids for choice in whole.choices] == [ANSWER.tokens] * 2
        chunks = await chunks_of(chat(client, n=2, stream=True, extra={"return_token_ids": True}))
        plain = await chat(client)
    opening = [chunk for chunk in chunks if chunk.choices[0].delta.role]
    assert [chunk.prompt_token_ids for chunk in opening] == [prompt] * 2
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks if chunk not in opening)
    told = [[], []]
    for chunk in chunks:
        (choice,) = chunk.choices
        told[choice.index] += getattr(choice, "token_ids", [])
    assert told == [ANSWER.tokens] * 2
    assert not hasattr(plain, "prompt_token_ids")
    assert not hasattr(plain.choices[0], "token_ids")


async def test_completions_have_the_token_ids_of_each_prompt():
    prompts = ["a", [5, 6, 7]]
    expected = [TOKENIZER.encode("a", add_special_tokens=True), [5, 6, 7]]
    asked = {"model": MODEL, "max_tokens": 50, "n": 2, "extra_body": {"return_token_ids": True}}
    async with client_of() as client:
        for prompt, tokens in zip(prompts, expected, strict=True):
            whole = await client.completions.create(prompt=prompt, **asked)
            assert [choice.prompt_token_ids for choice in whole.choices] == [tokens] * 2
            assert [choice.token_ids for choice in whole.choices] == [ANSWER.tokens] * 2
        chunks = await chunks_of(client.completions.create(prompt=["a", "b"], stream=True, **asked))
    told, begun = [[], [], [], []], []
    for chunk in chunks:
        (choice,) = chunk.choices
        told[choice.index] += choice.token_ids
        begun += [(choice.index, choice.prompt_token_ids)] if hasattr(choice, "prompt_token_ids") else []
    assert told == [ANSWER.tokens] * 4
    texts = [TOKENIZER.encode(text, add_special_tokens=True) for text in ("a", "a", "b", "b")]
    assert sorted(begun) == [*enumerate(texts)]


async def test_tokens_of_log_probabilities_are_named_by_their_ids():
    extra = {"return_tokens_as_token_ids": True}
    async with client_of() as client:
        whole = await chat(client, logprobs=True, top_logprobs=1, extra=extra)
        content = whole.choices[0].logprobs.content
        assert [entry.token for entry in content] == [f"token_id:{token}" for token in ANSWER.tokens[:-1]]
        assert b"".join(bytes(entry.bytes) for entry in content).decode() == TEXT
        assert content[0].top_logprobs[0].token.startswith("token_id:")
        text = await client.completions.create(model=MODEL, prompt="a", max_tokens=50, logprobs=1, extra_body=extra)
    assert text.choices[0].logprobs.tokens == [f"token_id:{token}" for token in ANSWER.tokens[:-1]]


async def test_every_chunk_has_the_usage_so_far():
    async with client_of() as client:
        texts = client.completions.create(model=MODEL, prompt="a", max_tokens=50, stream=True, stream_options=USAGE)
        for chunks in (await chunks_of(chat(client, stream=True, stream_options=USAGE)), await chunks_of(texts)):
            counts = [chunk.usage.completion_tokens for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[0] <= 1
            assert counts[-2:] == [len(ANSWER.tokens)] * 2
            assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
            assert chunks[-1].choices == []


async def test_the_answer_ends_with_its_stop_string_or_its_last_token_if_asked():
    include = {"include_stop_str_in_output": True}
    async with client_of() as client:
        whole = await chat(client, stop="friend", extra=include)
        assert whole.choices[0].message.content == "Hello there, my friend"
        chunks = await chunks_of(chat(client, stop=["friend"], stream=True, extra=include))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there, my friend"
        shown = await chat(client, extra={**include, "skip_special_tokens": False})
        hidden = await chat(client, extra={"skip_special_tokens": False, "spaces_between_special_tokens": False})
    assert shown.choices[0].message.content == TEXT + TOKENIZER.token_text(EOS)
    assert hidden.choices[0].message.content == TEXT


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"stop": ["nobody", "friend"]}, "friend"),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS),
        ({"stop_token_ids": [EOS]}, None),  # the end of a text by itself, as without the field
        ({"stop": ["friend"], "n": 2, "logprobs": 1}, "friend"),
    ],
)
async def test_choices_name_what_ended_them(extra, named):
    async with client_of() as client:
        asked = {"model": MODEL, "prompt": "Hi", "extra_body": extra}
        whole = await client.completions.create(**asked)
        *_, last = await chunks_of(client.completions.create(**asked, stream=True))
        assert [getattr(choice, "stop_reason", None) for choice in (*whole.choices, last.choices[0])] == [named] * (
            len(whole.choices) + 1
        )
        extra = {**extra, **({"logprobs": True} if "logprobs" in extra else {})}
        whole = await chat(client, extra=extra)
        *_, last = await chunks_of(chat(client, extra=extra, stream=True))
        for choice in (*whole.choices, last.choices[0]):
            assert (choice.finish_reason, getattr(choice, "stop_reason", None)) == ("stop", named)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, slice(0, 4)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 500}, slice(-12, None)),
        ({"truncate_prompt_tokens": 300}, slice(None)),
    ],
)
async def test_prompts_are_truncated(fields, kept):
    messages = [{"role": "user", "content": "Hello there " * 20}]
    async with client_of() as client:
        answer = await chat(client, messages, extra={**fields, "return_token_ids": True})
        ids = TOKENIZER.encode_conversation(messages)
        assert answer.prompt_token_ids == ids[kept]
        assert answer.usage.prompt_tokens == len(ids[kept])
        for prompt in ("Hello there " * 20, ids):
            extra = {**fields, "return_token_ids": True}
            extra.setdefault("max_tokens", 50)
            text = await client.completions.create(model=MODEL, prompt=prompt, extra_body=extra)
            whole = TOKENIZER.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else ids
            expected = whole[kept]
            if isinstance(prompt, str) and len(expected) < len(whole):
                expected = [whole[0], *expected[1:]]  # the begin-of-text token stays
            assert text.choices[0].prompt_token_ids == expected


async def test_a_prompt_longer_than_the_window_fits_once_it_is_truncated():
    messages = [{"role": "user", "content": "Hello there " * 2_000}]
    async with client_of() as client:
        answer = await chat(client, messages, max_tokens=50, extra={"truncate_prompt_tokens": -1})
        assert answer.usage.prompt_tokens == CARD.context_tokens - 50
        with pytest.raises(openai.BadRequestError) as refusal:
            await chat(client, messages, max_tokens=50, extra={"truncate_prompt_tokens": CARD.context_tokens})
    assert refusal.value.param == "truncate_prompt_tokens"


async def test_a_message_is_continued_from_the_prompt_of_the_reference(oracle):
    extra = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    async with client_of() as client:
        answer = await chat(client, BEGUN, extra=extra)
        plain = await chat(client, BEGUN, extra={"add_generation_prompt": False, "return_token_ids": True})
        with pytest.raises(openai.BadRequestError, match="exclude each other"):
            await chat(client, BEGUN, extra={**extra, "add_generation_prompt": True})
    expected = oracle.apply_chat_template(BEGUN, continue_final_message=True)["input_ids"]
    assert answer.prompt_token_ids == expected == TOKENIZER.encode_conversation(USER) + tokens_of("The answer is")
    assert answer.choices[0].message.content == TEXT
    assert plain.prompt_token_ids == oracle.apply_chat_template(BEGUN)["input_ids"]


async def test_a_chat_template_is_used_only_where_it_is_trusted():
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    extra = {"chat_template": source, "return_token_ids": True}
    async with client_of() as client:
        with pytest.raises(openai.BadRequestError) as refusal:
            await chat(client, extra=extra)
    assert refusal.value.param == "chat_template"
    async with client_of(tokenizer=Tokenizer.load(BUNDLED_MODEL, trusts_request_templates=True)) as client:
        answer = await chat(client, extra=extra)
        with pytest.raises(openai.BadRequestError, match="cannot write these messages"):
            await chat(client, extra={"chat_template": "{{ messages.append(1) }}"})
    assert TOKENIZER.decode(answer.prompt_token_ids) == "user: Hi\nassistant:"
