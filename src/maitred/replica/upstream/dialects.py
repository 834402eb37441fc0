"""Dialects of OpenAI's API: the differences between its servers, as data.

A dialect names three things: where a server reports its health and load, which fields may be sent to it, and which
rules its answers keep. All servers stop working on a request when its connection is closed. The sources are the
servers' own documentation, named beside each entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from maitred.wire.anthropic.outbound import API_VERSION

_OPENAI_FIELDS = frozenset(
    {
        *("messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "user", "echo", "suffix"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "metadata"),
        *("reasoning_effort", "verbosity", "prediction", "prompt_cache_key", "safety_identifier", "store"),
    }
)
"""OpenAI's own fields whose answers can be passed on: not audio, not images, not functions of before 2023."""
_SAMPLING_FIELDS = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"})
_GUIDED_FIELDS = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"})
_CONTINUE_LAST_MESSAGE: Mapping[str, object] = {"continue_final_message": True, "add_generation_prompt": False}
"""Fields that continue the last message.

The names are those of `apply_chat_template` in Transformers, which several servers have taken over.
"""


@dataclass(frozen=True, slots=True)
class LoadGauges:
    """Names of the Prometheus gauges of a server's load, all of which may occur once for each engine."""

    running: str
    waiting: str
    kv_usage: tuple[str, ...] = ()
    """Usage of the KV cache, from 0 to 1; of several names the first that is there counts."""
    path: str = "/metrics"


@dataclass(frozen=True, slots=True)
class UpstreamDialect:
    """Differences of one kind of server.

    Attributes:
        health_path: A path that answers 200 when requests can run; at the root of the server if it begins with a slash,
            below the URL of the API otherwise.
        load_gauges: Gauges of its load; None: it reports none.
        allowed_fields: Fields that may be sent. Other fields of a caller's request are rejected, since the server would
            ignore them.
        limit_field: Name of a conversation's `max_tokens`.
        key_header: The header that carries the API key; ``Authorization`` takes it as a bearer token.
        stream_options: Options that ask for the usage.
        has_token_per_chunk: Whether every chunk with text has at least one token of its own, so that more chunks than
            tokens are chunks that were sent twice.
        headers: Headers of every request.
        sends_done: Whether a stream ends with ``[DONE]``. Elsewhere it ends with its usage, and then the body.
        has_usage_per_choice: Whether each of several choices is counted by itself, and its prompt with it.
        continuation_fields: Fields that make the server continue the last message of a conversation, which is then its
            own; None: it cannot.
    """

    health_path: str
    load_gauges: LoadGauges | None = None
    allowed_fields: frozenset[str] = _OPENAI_FIELDS
    limit_field: str = "max_tokens"
    key_header: str = "Authorization"
    stream_options: Mapping[str, object] = field(default_factory=lambda: {"include_usage": True})
    has_token_per_chunk: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    sends_done: bool = True
    has_usage_per_choice: bool = False
    continuation_fields: Mapping[str, object] | None = None


_MODELS_PATH = "models"
"""Path of the list of models, which every server has; with credentials it also shows whether these are valid."""
ANTHROPIC_DIALECT = UpstreamDialect(_MODELS_PATH, key_header="x-api-key", headers={"anthropic-version": API_VERSION})
"""Dialect of all servers of the kind `anthropic`.

The fields that may be sent to them are decided in `maitred.wire.anthropic.outbound`.
"""


DialectName = Literal[
    "generic",
    "vllm",
    "sglang",
    "tgi",
    "trtllm",
    "llamacpp",
    "transformers",
    "ollama",
    "litellm",
    "openai",
    "azure",
    "groq",
    "together",
]

DIALECTS: Mapping[DialectName, UpstreamDialect] = {
    "generic": UpstreamDialect(_MODELS_PATH, allowed_fields=_OPENAI_FIELDS | _SAMPLING_FIELDS | _GUIDED_FIELDS),
    # docs.vllm.ai: "Production Metrics", "OpenAI-Compatible Server" (extra parameters); 0.32. The KV gauge has its
    # new name since the V1 engine. The guided_* fields of earlier versions are silently ignored since 0.12, so they
    # are not sent. Usage with every chunk bills what a caller breaks off to the token.
    "vllm": UpstreamDialect(
        "/health",
        LoadGauges(
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ),
        _OPENAI_FIELDS | _SAMPLING_FIELDS | {"structured_outputs", "chat_template_kwargs"},
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        has_token_per_chunk=True,
        continuation_fields=_CONTINUE_LAST_MESSAGE,
    ),
    # docs.sglang.io: "Production Metrics" (with --enable-metrics), "OpenAI APIs - Completions". It goes on behind the
    # template's own opening of a turn, so it takes the one flag without the other (sgl-project/sglang, pull 4226).
    "sglang": UpstreamDialect(
        "/health",
        LoadGauges("sglang:num_running_reqs", "sglang:num_queue_reqs", ("sglang:token_usage",)),
        _OPENAI_FIELDS | _SAMPLING_FIELDS | {"chat_template_kwargs"},
        has_token_per_chunk=True,
        continuation_fields={"continue_final_message": True},
    ),
    # huggingface.co/docs/text-generation-inference: "Metrics", "Messages API".
    "tgi": UpstreamDialect("/health", LoadGauges("tgi_batch_current_size", "tgi_queue_size"), has_token_per_chunk=True),
    # nvidia.github.io/TensorRT-LLM: "trtllm-serve". Its /metrics is JSON of iterations, not gauges.
    "trtllm": UpstreamDialect("/health", allowed_fields=_OPENAI_FIELDS | _SAMPLING_FIELDS),
    # github.com/ggml-org/llama.cpp, tools/server/README.md (metrics with --metrics, the KV gauge in old builds only);
    # build 11549. It ignores echo and suffix silently. After a stream it closes the connection, although it says
    # that it keeps it, and the next request would meet that. It goes on with a last message of the assistant unless it
    # was started with --no-prefill-assistant (pull 13608), and since pull 23012 also then, where the flags ask for it.
    "llamacpp": UpstreamDialect(
        "/health",
        LoadGauges("llamacpp:requests_processing", "llamacpp:requests_deferred", ("llamacpp:kv_cache_usage_ratio",)),
        (_OPENAI_FIELDS | {"top_k", "min_p", "ignore_eos", "chat_template_kwargs"}) - {"echo", "suffix"},
        headers={"connection": "close"},
        has_usage_per_choice=True,
        continuation_fields=_CONTINUE_LAST_MESSAGE,
    ),
    # huggingface.co/docs/transformers: "Serving"; transformers 5.23. Its list of models fails without a hub. What it
    # does not do, such as n, it ignores; its frequency_penalty is a repetition penalty, and it answers with the stop
    # string and what came with it.
    "transformers": UpstreamDialect(
        "/health",
        allowed_fields=frozenset({"messages", "prompt", "temperature", "top_p", "seed", "logit_bias", "tools"}),
        sends_done=False,
    ),
    # github.com/ollama/ollama, docs/openai.md: n and logit_bias are not taken; top_k and min_p stand in Modelfiles.
    "ollama": UpstreamDialect("/api/version", allowed_fields=_OPENAI_FIELDS - {"logit_bias", "n", "user", "metadata"}),
    # docs.litellm.ai: "Health Checks". It passes on what it does not know.
    "litellm": UpstreamDialect("/health/liveliness", allowed_fields=_OPENAI_FIELDS | _SAMPLING_FIELDS | _GUIDED_FIELDS),
    # platform.openai.com/docs/api-reference/chat: max_tokens is deprecated, and reasoning models refuse it.
    "openai": UpstreamDialect(_MODELS_PATH, limit_field="max_completion_tokens"),
    # learn.microsoft.com/azure/ai-foundry/openai: the API below /openai/v1, keys in a header of their own.
    "azure": UpstreamDialect(_MODELS_PATH, limit_field="max_completion_tokens", key_header="api-key"),
    # console.groq.com/docs/openai: logprobs, logit_bias, top_logprobs and n > 1 are refused there.
    "groq": UpstreamDialect(
        _MODELS_PATH,
        allowed_fields=_OPENAI_FIELDS - {"logprobs", "logit_bias", "top_logprobs"},
        limit_field="max_completion_tokens",
    ),
    # docs.together.ai/reference/chat-completions.
    "together": UpstreamDialect(_MODELS_PATH, allowed_fields=_OPENAI_FIELDS | {"top_k", "min_p", "repetition_penalty"}),
}
