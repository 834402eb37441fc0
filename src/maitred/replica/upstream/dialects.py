"""Dialects of OpenAI's API: the differences between server implementations, as data.

A dialect defines three things: where a server reports its health and load, which request fields it accepts, and how its
streams end. Every server cancels a request when its connection is closed. The sources are the servers' own
documentation, named beside each entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from maitred.wire.anthropic.outbound import API_VERSION
from maitred.wire.openai.responses import REASONING_FIELDS, THOUGHT_FIELDS

GATEWAY_FIELDS = frozenset(
    {"model", "stream", "stream_options", "priority", "service_tier", "max_tokens", "max_completion_tokens", "cache"}
)
"""Request fields that no server gets as they came, because the gateway honours them or sets them anew."""
_OPENAI_FIELDS = frozenset(
    {
        *("messages", "prompt", "temperature", "top_p", "n", "stop", "seed"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "user", "echo", "suffix"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "metadata"),
        *("reasoning_effort", "verbosity", "prediction", "prompt_cache_key", "safety_identifier", "store"),
    }
)
"""Request fields of OpenAI's API that its open servers have too; not audio, images or the old `functions`."""
_PLATFORM_FIELDS = frozenset(
    {"prompt_cache_retention", "prompt_cache_options", "modalities", "audio", "web_search_options"}
)
"""Fields that OpenAI's own servers have besides."""
_SAMPLING_FIELDS = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"})
_GUIDED_FIELDS = frozenset({"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"})
_PROVIDER_FIELDS = frozenset(
    {
        *("thinking", "reasoning", "thinking_budget", "reasoning_format", "reasoning_split", "prompt_mode"),
        *("chat_template_kwargs", "cache_control", "safe_prompt", "random_seed", "tool_stream", "usage"),
        *("enable_search", "search_options", "search_parameters", "web_search", "translation_options"),
    }
)
"""Fields that providers of models have added to OpenAI's API."""
_ALL_FIELDS = _OPENAI_FIELDS | _PLATFORM_FIELDS | _SAMPLING_FIELDS | _GUIDED_FIELDS | _PROVIDER_FIELDS
"""Fields for a server of which nothing is known but its API: it is likely to be such a provider."""
_VLLM_FIELDS = frozenset(
    {
        *("structured_outputs", "chat_template_kwargs", "chat_template", "documents", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
        *("allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens"),
        *("spaces_between_special_tokens", "use_beam_search", "length_penalty", "watermarking"),
        *("repetition_detection", "thinking_token_budget", "prompt_logprobs", "logprob_token_ids"),
        *("return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "routed_experts_prompt_start"),
        *("cache_salt", "session_id"),
    }
)
_SGLANG_FIELDS = frozenset(
    {
        *("chat_template_kwargs", "continue_final_message", "regex", "ebnf", "no_stop_trim", "stop_regex"),
        *("skip_special_tokens", "separate_reasoning", "stream_reasoning", "return_hidden_states"),
        *("cache_salt", "extra_key"),
    }
)
_LLAMACPP_FIELDS = frozenset(
    {
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "grammar", "json_schema"),
        *("typical_p", "mirostat", "mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent"),
        *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "dry_sequence_breakers", "repeat_penalty", "repeat_last_n", "samplers", "min_keep"),
        *("n_probs", "post_sampling_probs", "reasoning_format", "parse_tool_calls", "cache_prompt"),
    }
)
_CONTINUE_LAST_MESSAGE: Mapping[str, object] = {"continue_final_message": True, "add_generation_prompt": False}
"""Fields that make the server continue the last message.

Several servers took the names from `apply_chat_template` in Transformers.
"""
CONTINUATION_FIELDS = frozenset(_CONTINUE_LAST_MESSAGE)
"""Fields of a request whose last message is to be continued."""


@dataclass(frozen=True, slots=True)
class LoadGauges:
    """Names of the Prometheus gauges of a server's load; each may have one sample per engine."""

    running: str
    waiting: str
    kv_usage: tuple[str, ...] = ()
    """Names of the gauge of KV cache usage (0 to 1); the first name that exists is used."""
    path: str = "/metrics"


@dataclass(frozen=True, slots=True)
class UpstreamDialect:
    """Properties of one server implementation.

    Attributes:
        health_path: Path that returns 200 when the server is ready; absolute with a leading slash, else relative to the
            API's URL.
        load_gauges: Gauges of the server's load; None: it has no usable metrics.
        allowed_fields: Request fields that the server supports. `maitred.wire.openai.fields` says what becomes of
            others.
        max_tokens_field: Name of the `max_tokens` field in chat requests.
        api_key_header: Name of the header for the API key; in ``Authorization`` the key is a bearer token.
        stream_options: Value of `stream_options`, which requests the usage.
        has_token_per_chunk: Whether every chunk with text has at least one token, so that more chunks than tokens mean
            that chunks were duplicated.
        headers: Additional headers of every request.
        sends_done: Whether a stream ends with ``[DONE]``. If not, it ends with the usage, followed by the end of the
            body.
        has_usage_per_choice: Whether the server reports one usage per choice, each with the prompt tokens.
        thought_fields: Members of an earlier message that the server reads for the reasoning in it. Others refuse a
            message that has them.
        max_call_id_characters: Largest length of the id of a tool call; None: any.
        continuation_fields: Fields that make the server continue the last assistant message; None: it cannot.
    """

    health_path: str
    load_gauges: LoadGauges | None = None
    allowed_fields: frozenset[str] = _OPENAI_FIELDS
    max_tokens_field: str = "max_tokens"
    api_key_header: str = "Authorization"
    stream_options: Mapping[str, object] = field(default_factory=lambda: {"include_usage": True})
    has_token_per_chunk: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    sends_done: bool = True
    has_usage_per_choice: bool = False
    thought_fields: frozenset[str] = frozenset(REASONING_FIELDS)
    max_call_id_characters: int | None = None
    continuation_fields: Mapping[str, object] | None = None


_MODELS_PATH = "models"
"""Path of the model list, which every server has; it also shows whether the API key is valid."""
ANTHROPIC_DIALECT = UpstreamDialect(
    _MODELS_PATH,
    allowed_fields=frozenset(
        {
            *("messages", "temperature", "top_p", "top_k", "stop", "tools", "tool_choice", "parallel_tool_calls"),
            *("user", "safety_identifier", "thinking", "response_format"),
        }
    ),
    api_key_header="x-api-key",
    headers={"anthropic-version": API_VERSION},
)
"""Dialect of all servers of the kind `anthropic`.

`maitred.wire.anthropic.outbound` writes these fields in the words of Messages.
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
    "generic": UpstreamDialect(_MODELS_PATH, allowed_fields=_ALL_FIELDS),
    # docs.vllm.ai: "Production Metrics", "OpenAI-Compatible Server" (extra parameters); 0.32. The V1 engine renamed the
    # KV gauge. The guided_* fields of earlier versions are silently ignored since 0.12, so they are not sent. The usage
    # in every chunk makes the bill of a cancelled request exact.
    "vllm": UpstreamDialect(
        "/health",
        LoadGauges(
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ),
        _OPENAI_FIELDS | _SAMPLING_FIELDS | _VLLM_FIELDS,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        has_token_per_chunk=True,
        continuation_fields=_CONTINUE_LAST_MESSAGE,
    ),
    # docs.sglang.io: "Production Metrics" (with --enable-metrics), "OpenAI APIs - Completions". It keeps the generation
    # prompt of the template, so it accepts only `continue_final_message` (sgl-project/sglang, pull 4226).
    "sglang": UpstreamDialect(
        "/health",
        LoadGauges("sglang:num_running_reqs", "sglang:num_queue_reqs", ("sglang:token_usage",)),
        _OPENAI_FIELDS | _SAMPLING_FIELDS | _SGLANG_FIELDS,
        has_token_per_chunk=True,
        continuation_fields={"continue_final_message": True},
    ),
    # huggingface.co/docs/text-generation-inference: "Metrics", "Messages API".
    "tgi": UpstreamDialect("/health", LoadGauges("tgi_batch_current_size", "tgi_queue_size"), has_token_per_chunk=True),
    # nvidia.github.io/TensorRT-LLM: "trtllm-serve". Its /metrics is JSON of iterations, not gauges.
    "trtllm": UpstreamDialect("/health", allowed_fields=_OPENAI_FIELDS | _SAMPLING_FIELDS),
    # github.com/ggml-org/llama.cpp, tools/server/README.md (metrics with --metrics, the KV gauge in old builds only);
    # build 11549. It ignores echo and suffix silently. After a stream it closes the connection in spite of keep-alive,
    # so the next request on that connection would fail. It continues a last assistant message unless it was started
    # with --no-prefill-assistant (pull 13608); since pull 23012 the two flags override that option.
    "llamacpp": UpstreamDialect(
        "/health",
        LoadGauges("llamacpp:requests_processing", "llamacpp:requests_deferred", ("llamacpp:kv_cache_usage_ratio",)),
        (_OPENAI_FIELDS | {"top_k", "min_p", "ignore_eos"} | _LLAMACPP_FIELDS) - {"echo", "suffix"},
        headers={"connection": "close"},
        has_usage_per_choice=True,
        continuation_fields=_CONTINUE_LAST_MESSAGE,
    ),
    # huggingface.co/docs/transformers: "Serving"; transformers 5.23. Its model list fails without access to the Hugging
    # Face Hub. It ignores unsupported fields such as n; its frequency_penalty is a repetition penalty, and its output
    # includes the stop string and the rest of that token.
    "transformers": UpstreamDialect(
        "/health",
        allowed_fields=frozenset({"messages", "prompt", "temperature", "top_p", "seed", "logit_bias", "tools"}),
        sends_done=False,
    ),
    # github.com/ollama/ollama, docs/openai.md: it does not support n and logit_bias; top_k and min_p are set in
    # Modelfiles.
    "ollama": UpstreamDialect("/api/version", allowed_fields=_OPENAI_FIELDS - {"logit_bias", "n", "user", "metadata"}),
    # docs.litellm.ai: "Health Checks", "Reasoning Content" (the signed blocks of Anthropic's models). It forwards
    # unknown fields.
    "litellm": UpstreamDialect(
        "/health/liveliness", allowed_fields=_ALL_FIELDS, thought_fields=frozenset(THOUGHT_FIELDS)
    ),
    # platform.openai.com/docs/api-reference/chat: max_tokens is deprecated, and reasoning models reject it.
    "openai": UpstreamDialect(
        _MODELS_PATH,
        allowed_fields=_OPENAI_FIELDS | _PLATFORM_FIELDS,
        max_tokens_field="max_completion_tokens",
        thought_fields=frozenset(),
        max_call_id_characters=40,
    ),
    # learn.microsoft.com/azure/ai-foundry/openai: the API is at /openai/v1, and the key has its own header.
    "azure": UpstreamDialect(
        _MODELS_PATH,
        allowed_fields=_OPENAI_FIELDS | _PLATFORM_FIELDS,
        max_tokens_field="max_completion_tokens",
        api_key_header="api-key",
        thought_fields=frozenset(),
        max_call_id_characters=40,
    ),
    # console.groq.com/docs/openai: it rejects logprobs, logit_bias, top_logprobs and n > 1.
    "groq": UpstreamDialect(
        _MODELS_PATH,
        allowed_fields=(_OPENAI_FIELDS - {"logprobs", "logit_bias", "top_logprobs"})
        | {
            *("reasoning_format", "documents", "citation_options", "compound_custom", "search_settings"),
            "disable_tool_validation",
        },
        max_tokens_field="max_completion_tokens",
        thought_fields=frozenset({"reasoning"}),
    ),
    # docs.together.ai/reference/chat-completions.
    "together": UpstreamDialect(
        _MODELS_PATH,
        allowed_fields=_OPENAI_FIELDS
        | {
            *("top_k", "min_p", "repetition_penalty", "chat_template_kwargs", "reasoning", "safety_model"),
            "context_length_exceeded_behavior",
        },
    ),
}
