"""Keys of answers: whatever can change an answer changes its key."""

import pytest
from msgspec.structs import replace

from maitred.cache import answer_key
from maitred.cache.answer_key import engine_producer, engine_request, upstream_request
from maitred.core.grammar import Grammar
from maitred.core.inference import AnswerPrefix, CacheControl, Conversation, InferenceRequest, NativeRequest
from maitred.core.replica import ModelCard
from maitred.core.request import ModelFingerprint, SamplingParams
from maitred.core.tools import Tool, ToolRules

REQUEST = InferenceRequest("a-model", ["a text"], SamplingParams(0, 0))
CHAT = Conversation([{"role": "user", "content": "a text"}])
RULES = ToolRules((Tool("look", "tools[0]", {"type": "function"}),))
CARD = ModelCard("a-model", 4096, 1000, (2,), 8, 65_536, 8, "bf16", "cpu", digest=ModelFingerprint("a", "b", "c", "d"))
PROMPTS, LENGTHS = [[1, 2, 3]], [16]

OTHER_REQUEST = {
    "model": "b-model",
    "prompts": ["another text"],
    "sampling": SamplingParams(0, 0, temperature=0.5),
    "max_tokens": 7,
    "seed": 7,
    "unset_fields": frozenset({"top_p"}),
    "stops": ("stop",),
    "stops_in_reasoning": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "allowed_token_ids": (1,),
    "bad_words": ("bad",),
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
    "echo": True,
    "priority": 9,
    "ttft_in_s": 1.0,
    "itl_objective_s": 1.0,
    "deadline_in_s": 1.0,
    "partial": True,
    "retries": 1,
    "most_retries": 1,
    "escalate": True,
    "scored": True,
    "degradable": False,
    "cache": CacheControl(no_cache=True),
    "session": "a session",
    "user": "a user",
    "local_only": True,
    "regions": frozenset({"eu"}),
    "max_usd": 1.0,
    "whole": True,
    "prefix": AnswerPrefix("It", 1, estimated=False),
    "max_tokens_param": "max_output_tokens",
    "prompt_param": "messages",
    "needs": ("tools",),
    "left_out": ("betas",),
    "hints": ("metadata",),
    "tools": lambda: None,
    "to_openai": dict,
    "native": NativeRequest("messages", {}),
    "constraint": lambda: None,
}
OTHER_SAMPLING = {
    "max_tokens": 7,
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {7: 1.0},
    "top_logprobs": 2,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": (7,),
    "n": 2,
    "grammar": Grammar("regex", "a+"),
    "allowed_token_ids": (7,),
    "bad_words_token_ids": ((7,),),
    "prompt_logprobs": 1,
}
OTHER_CONVERSATION = {
    "messages": [{"role": "user", "content": "another text"}],
    "add_generation_prompt": False,
    "tools": [{"type": "function"}],
    "template_arguments": {"enable_thinking": False},
    "continue_final_message": True,
    "chat_template": "{{ messages }}",
}
OTHER_RULES = {
    "tools": (Tool("find", "tools[0]", {"type": "function"}),),
    "may": False,
    "must": True,
    "only": "look",
    "parallel": False,
}
OTHER_TOOL = {
    "name": "find",
    "param": "tools[1]",
    "declared": {"type": "custom"},
    "parameters": {"type": "object"},
    "strict": True,
}
OTHER_CARD = {
    "name": "b-model",
    "context_tokens": 2048,
    "vocab_size": 2000,
    "eos_token_ids": (3,),
    "max_sequences": 16,
    "kv_capacity_tokens": 1,
    "max_choices": 1,
    "dtype": "bf16, int8 weights",
    "device": "cuda",
    "embedding_dimensions": 8,
    "pooling": "mean",
    "feature_version": 1,
    "region": "us",
    "digest": ModelFingerprint("a", "b", "c", "e"),
}
OTHER_FINGERPRINT = {"shape": "x", "tokenizer": "x", "weights": "x", "content": "x"}


def engine_digest(request=REQUEST, rules=RULES):
    return engine_request(request, PROMPTS, LENGTHS, rules)


@pytest.mark.parametrize(
    ("struct", "others"),
    [
        (InferenceRequest, OTHER_REQUEST),
        (SamplingParams, OTHER_SAMPLING),
        (Conversation, OTHER_CONVERSATION),
        (ToolRules, OTHER_RULES),
        (Tool, OTHER_TOOL),
        (ModelCard, OTHER_CARD),
        (ModelFingerprint, OTHER_FINGERPRINT),
    ],
)
def test_every_field_has_another_value_here(struct, others):
    assert set(others) == set(struct.__struct_fields__)


@pytest.mark.parametrize("name", InferenceRequest.__struct_fields__)
def test_a_field_of_a_request_changes_the_key_or_stands_on_the_list(name):
    other = replace(REQUEST, **{name: OTHER_REQUEST[name]})
    assert getattr(other, name) != getattr(REQUEST, name)
    differs = engine_digest(other) != engine_digest()
    assert differs is (name not in answer_key.EXCLUDED_FIELDS)
    at_a_server = upstream_request(other, {}, None) != upstream_request(REQUEST, {}, None)
    assert at_a_server is (name not in answer_key.EXCLUDED_FIELDS)


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_every_sampling_parameter_changes_the_key(name):
    sampling = replace(REQUEST.sampling, **{name: OTHER_SAMPLING[name]})
    assert engine_digest(replace(REQUEST, sampling=sampling)) != engine_digest()


@pytest.mark.parametrize("name", Conversation.__struct_fields__)
def test_a_field_of_a_conversation_changes_the_key_unless_its_tokens_do(name):
    chat = replace(REQUEST, prompts=[CHAT])
    other = replace(REQUEST, prompts=[replace(CHAT, **{name: OTHER_CONVERSATION[name]})])
    assert (engine_digest(other) != engine_digest(chat)) is (name != "messages")
    assert engine_digest(chat) != engine_digest(), "an answer to a conversation is parsed, that to a text is not"


def test_the_text_that_the_model_continues_changes_the_key():
    first, second = (
        replace(
            CHAT,
            messages=[*CHAT.messages, {"role": "assistant", "content": begun}],
            continue_final_message=True,
        )
        for begun in ("<think>", "It")
    )
    assert engine_digest(replace(REQUEST, prompts=[first])) != engine_digest(replace(REQUEST, prompts=[second]))


@pytest.mark.parametrize("name", ToolRules.__struct_fields__)
def test_every_rule_for_tools_changes_the_key(name):
    assert engine_digest(rules=replace(RULES, **{name: OTHER_RULES[name]})) != engine_digest()


@pytest.mark.parametrize("name", Tool.__struct_fields__)
def test_a_field_of_a_tool_changes_the_key_or_stands_on_the_list(name):
    (tool,) = RULES.tools
    other = replace(RULES, tools=(replace(tool, **{name: OTHER_TOOL[name]}),))
    assert (engine_digest(rules=other) != engine_digest()) is (name not in answer_key.EXCLUDED_TOOL_FIELDS)


@pytest.mark.parametrize("name", ModelCard.__struct_fields__)
def test_a_field_of_a_model_changes_the_key_or_stands_on_the_list(name):
    other = replace(CARD, **{name: OTHER_CARD[name]})
    differs = engine_producer(other, "a format") != engine_producer(CARD, "a format")
    assert differs is (name not in answer_key.EXCLUDED_CARD_FIELDS)


def test_equal_devices_give_equal_answers():
    first, second = (engine_producer(replace(CARD, device=f"cuda:{number}"), "a format") for number in (0, 1))
    assert first == second != engine_producer(CARD, "a format")


@pytest.mark.parametrize("name", ModelFingerprint.__struct_fields__)
def test_every_part_of_the_files_of_a_model_changes_the_key(name):
    other = replace(CARD, digest=replace(CARD.digest, **{name: "x"}))
    assert engine_producer(other, "a format") != engine_producer(CARD, "a format")


def test_the_format_of_answers_changes_the_key():
    assert engine_producer(CARD, "a format") != engine_producer(CARD, "another format")


def test_tokens_and_lengths_change_the_key():
    assert engine_request(REQUEST, [[1, 2, 4]], LENGTHS, RULES) != engine_digest()
    assert engine_request(REQUEST, [[1, 2], [3]], LENGTHS, RULES) != engine_digest()
    assert engine_request(REQUEST, PROMPTS, [17], RULES) != engine_digest()


def test_any_field_that_a_server_gets_changes_the_key_unless_it_stands_on_the_list():
    before = upstream_request(REQUEST, {"messages": []}, None)
    assert upstream_request(REQUEST, {"messages": [], "a_new_field": 1}, None) != before
    for name in answer_key.EXCLUDED_SENT_FIELDS:
        assert upstream_request(REQUEST, {"messages": [], name: "x"}, None) == before


def test_a_request_in_the_words_of_its_client_is_another_one():
    before = upstream_request(REQUEST, {}, None)
    native = NativeRequest("messages", {"system": "Be brief."}, {"anthropic-beta": "a"})
    digests = {
        upstream_request(REQUEST, {}, native),
        upstream_request(REQUEST, {}, replace(native, api="responses")),
        upstream_request(REQUEST, {}, replace(native, fields={"system": "Be long."})),
        upstream_request(REQUEST, {}, replace(native, headers={"anthropic-beta": "b"})),
    }
    assert len(digests | {before}) == 5


def test_the_order_of_members_does_not_change_the_key():
    first = upstream_request(REQUEST, {"a": 1, "b": {"c": 2, "d": 3}}, None)
    assert upstream_request(REQUEST, {"b": {"d": 3, "c": 2}, "a": 1}, None) == first
