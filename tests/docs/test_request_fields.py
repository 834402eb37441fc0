"""Every field that the official clients and vLLM know is on a list here, and the page says on which."""

from pathlib import Path

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from maitred.replica.upstream.dialects import ANTHROPIC_DIALECT, DIALECTS, GATEWAY_FIELDS
from maitred.wire.anthropic.fields import HONOURED_FIELDS, MESSAGES_FIELDS
from maitred.wire.anthropic.requests import MessagesRequest
from maitred.wire.openai.decode import CHAT_FIELDS, COMPLETION_FIELDS
from maitred.wire.openai.fields import EMBEDDING_FIELDS, FIELDS, LIMIT_FIELDS
from maitred.wire.openai.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from maitred.wire.responses.fields import HONOURED_FIELDS as HONOURED_IN_RESPONSES
from maitred.wire.responses.fields import RESPONSES_FIELDS
from maitred.wire.responses.requests import ResponsesRequest
from scripts.request_fields import PAGE, rendered

VLLM = Path(__file__).parent.parent / "data" / "vllm_request_fields.txt"
"""Fields of vLLM's requests, from its `protocol.py` of November 2026."""
OPERATORS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "lora_path",
    "custom_logit_processor",
    "bootstrap_host",
    "models",
)


def vllm_fields(kind):
    lines = [line.partition(": ") for line in VLLM.read_text(encoding="utf-8").splitlines()]
    return {name for of, _, names in lines if of == kind for name in names.split()}


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text(encoding="utf-8") == rendered(), "run `python -m scripts.request_fields`"


@pytest.mark.parametrize(
    ("params", "known"),
    [
        (chat_create_params.CompletionCreateParamsBase, FIELDS),
        (completion_create_params.CompletionCreateParamsBase, FIELDS),
        (embedding_create_params.EmbeddingCreateParams, {*EmbeddingRequest.__struct_fields__, *EMBEDDING_FIELDS}),
        (message_create_params.MessageCreateParamsBase, HONOURED_FIELDS | MESSAGES_FIELDS.keys()),
        (beta_message_create_params.MessageCreateParamsBase, HONOURED_FIELDS | MESSAGES_FIELDS.keys()),
        (message_count_tokens_params.MessageCountTokensParams, HONOURED_FIELDS | MESSAGES_FIELDS.keys()),
        (response_create_params.ResponseCreateParamsBase, HONOURED_IN_RESPONSES | RESPONSES_FIELDS.keys()),
    ],
)
def test_every_field_of_the_official_clients_is_on_a_list(params, known):
    assert sorted(params.__annotations__.keys() - {*known}) == []


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_field_of_vllm_is_on_a_list(kind):
    assert sorted(vllm_fields(kind) - FIELDS.keys()) == []


def test_every_field_of_vllm_that_changes_an_answer_goes_to_vllm_or_is_the_operators():
    changing = {name for name in vllm_fields("chat") | vllm_fields("completion") if FIELDS[name].changes_answer}
    passed = DIALECTS["vllm"].allowed_fields | GATEWAY_FIELDS
    # Pictures and embeddings of prompts are not passed on, and the others would let a client into another's cache.
    assert sorted(changing - passed) == [
        *("ec_transfer_params", "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds"),
        "vllm_xargs",
    ]


def test_the_tables_know_every_field_that_something_here_honours():
    structs = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    allowed = frozenset().union(*(dialect.allowed_fields for dialect in [*DIALECTS.values(), ANTHROPIC_DIALECT]))
    assert sorted((structs | CHAT_FIELDS | COMPLETION_FIELDS | allowed) - FIELDS.keys()) == []
    assert sorted({*MessagesRequest.__struct_fields__} - HONOURED_FIELDS - MESSAGES_FIELDS.keys()) == []
    assert sorted({*ResponsesRequest.__struct_fields__} - HONOURED_IN_RESPONSES - RESPONSES_FIELDS.keys()) == []
    # What the engine honours it has a struct field for.
    assert sorted((CHAT_FIELDS | COMPLETION_FIELDS) - structs) == []


@pytest.mark.parametrize("dialect", [*DIALECTS.values(), ANTHROPIC_DIALECT])
def test_no_dialect_lets_clients_pass_by_the_limits_or_the_operator(dialect):
    assert dialect.allowed_fields & (LIMIT_FIELDS - GATEWAY_FIELDS) == set()
    assert dialect.allowed_fields.isdisjoint(OPERATORS)
