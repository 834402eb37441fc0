"""Keys of answers in the cache: a digest of everything that can change the answer.

The digest is made by exclusion. It takes in every field of the request, but for those that are listed here with the
reason why they cannot change the answer. So a field that is added later separates answers until somebody has thought
about it; a list of the fields that count would let other requests' answers through in the meantime.

A key also has what computes the answer (weights, tokenizer, template and types of numbers of a model, or the server and
its settings) and who shares it (its scope).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from maitred import __version__
from maitred.core.inference import Conversation, InferenceRequest, NativeRequest, Prompt
from maitred.core.replica import ModelCard
from maitred.core.tools import Tool, ToolRules

_ROUTED = frozenset({"model", "local_only", "regions", "max_usd", "escalate", "retries", "most_retries", "degradable"})
"""Fields that choose who answers; the key has the one that was chosen."""
_SCHEDULED = frozenset(
    {"priority", "ttft_in_s", "itl_objective_s", "deadline_in_s", "partial", "session", "user", "whole"}
)
"""Fields that say when and in which pieces the answer comes. An answer that a deadline has cut is not kept."""
_PARSED = frozenset(
    {
        *("max_tokens_param", "prompt_param", "needs", "left_out", "hints", "unset_fields"),
        *("tools", "constraint", "to_openai", "native"),
    }
)
"""Names for messages about the request, and its parts in another form: what our own engine gets of them is in
`sampling`, the prompts and the rules for tools; what a server gets is in the fields that are sent to it."""
EXCLUDED_FIELDS = _ROUTED | _SCHEDULED | _PARSED | {"cache", "prompts", "prefix"}
"""Fields of `InferenceRequest` that are not in the digest as they are. The prompts are in it as tokens or messages; a
request with the beginning of an answer is not kept."""
EXCLUDED_CARD_FIELDS = frozenset(
    {"name", "max_sequences", "kv_capacity_tokens", "max_choices", "embedding_dimensions", "region"}
)
"""Fields of `ModelCard` that say how much a replica can do at once, and where. The name is that of its folder."""
EXCLUDED_TOOL_FIELDS = frozenset({"param"})
"""Fields of `Tool`: the place of the tool in the request, for messages."""
EXCLUDED_SENT_FIELDS = frozenset(
    {
        *("model", "stream", "stream_options", "priority", "service_tier", "cache"),
        *("user", "safety_identifier", "metadata", "store"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
"""Fields of a request to a server that name its caller, or say how it is sent, scheduled and stored."""


def _getter(struct: type[msgspec.Struct], without: Collection[str]) -> Callable[[Any], tuple[object, ...]]:
    """Returns a function that gets all fields of a struct but those that are left out."""
    getter: Callable[[Any], tuple[object, ...]] = attrgetter(
        *(name for name in struct.__struct_fields__ if name not in without)
    )
    return getter


_request_fields = _getter(InferenceRequest, EXCLUDED_FIELDS | {"sampling"})
_card_fields = _getter(ModelCard, EXCLUDED_CARD_FIELDS)
_conversation_fields = _getter(Conversation, {"messages"})
_rule_fields = _getter(ToolRules, {"tools"})
_tool_fields = _getter(Tool, EXCLUDED_TOOL_FIELDS)
_DIGEST_BYTES = 32
_NAME_BYTES = 16
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


class AnswerKey(msgspec.Struct, frozen=True, gc=False):
    """Key of one answer in the cache."""

    digest: bytes
    """Digest of everything that can change the answer, with its scope."""
    tenant: str
    """Tenant whose request stores it; its answers can be removed together."""
    organisation: str
    """Organisation that its size counts for."""
    model: str
    """Name of the model; its answers can be removed together."""
    server: str = ""
    """Name of the servers of others that computed it, with their model; empty: engines of this gateway."""
    epoch: str = ""
    """The operator's `cache.epoch`, which is part of the digest; its answers can be removed together."""

    @property
    def name(self) -> str:
        """Public name of the answer."""
        return self.digest[:_NAME_BYTES].hex()

    @property
    def seal(self) -> bytes:
        """Secret part of the digest, known only to who knows the request; it authenticates what a store returns."""
        return self.digest[_NAME_BYTES:]


@lru_cache(maxsize=256)
def engine_producer(card: ModelCard, answer_format: str) -> bytes:
    """Returns a digest of what computes answers on engines of this gateway.

    Args:
        card: Card of the model, with the fingerprint of its files.
        answer_format: Everything by which tokens become text, reasoning and calls: the sources of the chat template,
            and the format.
    """
    card = replace(card, device=card.device.partition(":")[0])  # on which of equal devices does not matter
    return _digest([__version__, answer_format, *_card_fields(card)])


def engine_request(
    request: InferenceRequest, prompts: Sequence[Sequence[int]], lengths: Sequence[int], rules: ToolRules | None
) -> bytes:
    """Returns a digest of a request to engines of this gateway.

    Args:
        request: The request, with the defaults of the model, its tools and its grammar applied.
        prompts: Token ids of each prompt.
        lengths: Most output tokens of a choice, for each prompt.
        rules: Tools that may be called; None: no tools.
    """
    return _digest(
        [
            _fields_of(request),
            [*map(_form_of, request.prompts)],
            prompts,
            lengths,
            None if rules is None else _rules_of(rules),
        ]
    )


def engine_conversation(request: InferenceRequest, conversation: Conversation, rules: ToolRules | None) -> bytes:
    """Returns a digest of a request to engines of this gateway with its conversation as messages, not as tokens.

    Args:
        request: The request, with the defaults of the model, its tools and its grammar applied.
        conversation: The conversation, of which a part may be left out.
        rules: Tools that may be called; None: no tools.
    """
    return _digest(
        [
            _fields_of(request),
            _form_of(conversation),
            conversation.messages,
            None if rules is None else _rules_of(rules),
        ]
    )


def upstream_request(request: InferenceRequest, fields: Mapping[str, Any], native: NativeRequest | None) -> bytes:
    """Returns a digest of a request to servers of others.

    Args:
        request: The request.
        fields: Its fields in OpenAI's API.
        native: The request as its client wrote it, where a server gets it so; None: no server does.
    """
    return _digest(
        [
            _fields_of(request),
            _without_excluded(fields),
            None if native is None else [native.api, _without_excluded(native.fields), native.headers],
        ]
    )


def answer_digest(parts: Iterable[bytes | str]) -> bytes:
    """Returns the digest of a key from its parts: who shares the answer, what computes it, the request."""
    return _digest([*parts])


def _digest(parts: Collection[object]) -> bytes:
    return blake2b(_ENCODER.encode(parts), digest_size=_DIGEST_BYTES).digest()


def _fields_of(request: InferenceRequest) -> list[object]:
    """Returns the fields of a request, as values that the encoder can sort."""
    sampling, biases = request.sampling, list[tuple[int, float]]()
    if sampling.logit_bias:
        biases = sorted(sampling.logit_bias.items())
        sampling = replace(sampling, logit_bias={})
    return [biases, sampling, *_request_fields(request)]


def _form_of(prompt: Prompt) -> object:
    """Returns what decides how the answer to a prompt is read, but for its tokens."""
    if not isinstance(prompt, Conversation):
        return None
    begun = prompt.messages[-1].get("content") if prompt.continue_final_message else None
    return [begun, *_conversation_fields(prompt)]


def _rules_of(rules: ToolRules) -> list[object]:
    return [[*map(_tool_fields, rules.tools)], *_rule_fields(rules)]


def _without_excluded(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in EXCLUDED_SENT_FIELDS}
