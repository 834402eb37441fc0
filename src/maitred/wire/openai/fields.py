"""Request fields that clients send, of OpenAI's API and of the servers and providers that extend it.

Each target (our own engine, or the dialect of an upstream server) has a set of the fields that it honours. This table
says what becomes of every other field:

- a field that changes the answer is refused with a sentence that names the field and what to send instead, unless its
  value asks for nothing;
- a hint is left out, and the response header ``x-maitred-ignored`` names it;
- a field that is not in the table is treated as a hint, unless `server.strict` refuses unknown fields.

`docs/request-fields.md` is rendered from the table, and a test compares it with the types of the official clients and
with vLLM's protocol.
"""

import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

import msgspec

from maitred.core.errors import Unsupported


class RequestField(msgspec.Struct, frozen=True):
    """Rule for a request field that its target does not honour.

    Attributes:
        changes_answer: Whether the answer would be another one, so that the field is refused; otherwise it is a hint.
        neutral_values: Values that ask for nothing, besides null.
        alternative: Sentence that tells what to send instead; empty: the field can only be removed.
    """

    changes_answer: bool = True
    neutral_values: tuple[Any, ...] = ()
    alternative: str = ""

    def refuses(self, value: object) -> bool:
        """Returns whether a target that does not honour the field refuses this value."""
        if not self.changes_answer or value is None:
            return False
        # In Python true equals 1, in JSON it does not.
        is_flag = isinstance(value, bool)
        return not any(value == neutral and isinstance(neutral, bool) is is_flag for neutral in self.neutral_values)


HINT = RequestField(changes_answer=False)
_REFUSED = RequestField()
_FALSE = RequestField(neutral_values=(False,))
_TRUE = RequestField(neutral_values=(True,))
_ZERO = RequestField(neutral_values=(0,))
_ONE = RequestField(neutral_values=(1,))
_LIST = RequestField(neutral_values=([],))
_OBJECT = RequestField(neutral_values=({},))


def _instead(alternative: str, *neutral_values: object) -> RequestField:
    return RequestField(neutral_values=neutral_values, alternative=alternative)


_LIMIT = _instead("Send max_tokens.")
_OPERATOR = _instead("The operator of this gateway decides it.")
_MODEL_CHOICE = _instead("Name the model in model; the operator of this gateway configures fallbacks.")
_TEMPLATE = "Send chat_template_kwargs, if the model's template reads it there."
_GRAMMAR = "Send structured_outputs."
_CONTINUE = "Send the whole text as prompt to /v1/completions."
_SALT = "Prefixes are shared within an organisation only: use a key of another organisation."
_INSTRUCT = "Write it into the texts of input, as the model was trained."
_SEARCH = "Search by a tool of your own."

_CONTINUING = _instead(_CONTINUE, False)
_MEDIA = _instead("Send parts of the type text, or name a model that reads it.")
FIELDS: Mapping[str, RequestField] = {
    # OpenAI's API.
    "model": _REFUSED,
    "messages": _instead("Use /v1/chat/completions."),
    "prompt": _instead("Use /v1/completions."),
    "max_tokens": _REFUSED,
    "max_completion_tokens": _LIMIT,
    "temperature": _REFUSED,
    "top_p": _ONE,
    "n": _instead("Send several requests.", 1),
    "stop": _instead("Cut the answer yourself.", [], ""),
    "seed": HINT,
    "presence_penalty": _ZERO,
    "frequency_penalty": _ZERO,
    "logit_bias": _OBJECT,
    "logprobs": _instead("In /v1/completions logprobs is a number, in /v1/chat/completions true or false.", False),
    "top_logprobs": _instead("In /v1/completions send logprobs.", 0),
    "stream": _REFUSED,
    "stream_options": HINT,
    "service_tier": HINT,
    "user": HINT,
    "metadata": HINT,
    "echo": _instead("Put the prompt before the answer yourself.", False),
    "suffix": _instead("Ask for what stands between the texts in prompt.", ""),
    "best_of": _instead("Send n.", 1),
    "tools": _instead("Use /v1/chat/completions and a model that knows tools.", []),
    "tool_choice": _instead("Use /v1/chat/completions and a model that knows tools.", "none", "auto"),
    "parallel_tool_calls": _TRUE,
    "functions": _instead("Send tools.", []),
    "function_call": _instead("Send tool_choice.", "none", "auto"),
    "response_format": _instead("Ask for the form in the prompt.", {"type": "text"}),
    "reasoning_effort": HINT,
    "verbosity": HINT,
    "prediction": HINT,
    "prompt_cache_key": HINT,
    "prompt_cache_retention": HINT,
    "prompt_cache_options": HINT,
    "safety_identifier": HINT,
    "store": HINT,
    "modalities": _instead("Ask for text.", ["text"]),
    "audio": _instead("Ask for text."),
    "web_search_options": _instead(_SEARCH),
    "moderation": _instead("Check the answer by a request of your own."),
    # Sampling and output, in the names of vLLM, SGLang, llama.cpp, TGI and other open servers.
    "top_k": RequestField(neutral_values=(0, -1)),
    "min_p": _ZERO,
    "top_a": _ZERO,
    "tfs": _ONE,
    "typical_p": _ONE,
    "repetition_penalty": _ONE,
    "repeat_penalty": _instead("Send repetition_penalty.", 1),
    "repeat_last_n": _instead("Send repetition_penalty."),
    "no_repeat_ngram_size": _ZERO,
    "length_penalty": _ONE,
    "min_tokens": _ZERO,
    "ignore_eos": _FALSE,
    "stop_token_ids": _LIST,
    "stop_regex": _instead("Send stop.", [], ""),
    "no_stop_trim": _FALSE,
    "include_stop_str_in_output": _instead("Append the stop string yourself.", False),
    "skip_special_tokens": _TRUE,
    "spaces_between_special_tokens": _TRUE,
    "allowed_token_ids": _instead("Send structured_outputs, or logit_bias."),
    "bad_words": _instead("Send logit_bias.", []),
    "use_beam_search": _instead("Send n.", False),
    "num_beams": _instead("Send n.", 1),
    "watermark": _FALSE,
    "watermarking": _FALSE,
    "repetition_detection": _instead("Send repetition_penalty."),
    "prompt_logprobs": _instead("Use a model of this server's own engines, or one of vLLM."),
    "logprob_token_ids": _instead("Send top_logprobs."),
    "n_probs": _instead("Send logprobs and top_logprobs.", 0),
    "post_sampling_probs": _FALSE,
    "return_token_ids": _instead("Send the text to /tokenize.", False),
    "return_tokens": _instead("Send the text to /tokenize.", False),
    "return_tokens_as_token_ids": _FALSE,
    "return_prompt_text": _FALSE,
    "return_hidden_states": _FALSE,
    "return_full_text": _instead("Put the prompt before the answer yourself.", False),
    "routed_experts_prompt_start": _ZERO,
    "details": _instead("Send logprobs.", False),
    "decoder_input_details": _FALSE,
    "mirostat": _ZERO,
    "mirostat_tau": HINT,
    "mirostat_eta": HINT,
    "dynatemp_range": _ZERO,
    "dynatemp_exponent": HINT,
    "xtc_probability": _ZERO,
    "xtc_threshold": HINT,
    "dry_multiplier": _ZERO,
    "dry_base": HINT,
    "dry_allowed_length": HINT,
    "dry_penalty_last_n": HINT,
    "dry_sequence_breakers": HINT,
    "samplers": _REFUSED,
    "min_keep": _ZERO,
    "do_sample": _instead("Send temperature.", True),
    "random_seed": _instead("Send seed."),
    # Other words for the limit; see `LIMIT_FIELDS`.
    "max_new_tokens": _LIMIT,
    "max_output_tokens": _LIMIT,
    "max_length": _LIMIT,
    "n_predict": _instead("Send max_tokens.", -1),
    "num_predict": _LIMIT,
    "t_max_predict_ms": _instead("Send the header x-maitred-deadline-ms.", 0),
    "generation_config": _instead("Send its members as fields."),
    "options": _instead("Send its members as fields.", {}),
    "extra_body": _instead("Send its members as fields.", {}),
    # The prompt, and how it is rendered.
    "chat_template": _instead("Render the prompt yourself and send it to /v1/completions."),
    "chat_template_kwargs": _OBJECT,
    "enable_thinking": _instead(_TEMPLATE),
    "add_generation_prompt": _instead(_CONTINUE, True),
    "continue_final_message": _instead(f"End messages with one of the role user. {_CONTINUE}", False),
    "thinking_forced_open": _CONTINUING,
    "add_special_tokens": _instead("Send the prompt as token ids.", False),
    "documents": _instead("Write the documents into the messages.", []),
    "truncate_prompt_tokens": _instead("Shorten the prompt."),
    "truncation_side": HINT,
    "truncate": _instead("Send truncate_prompt_tokens."),
    "context_length_exceeded_behavior": _instead("Shorten the prompt.", "error"),
    "transforms": _instead("Shorten the prompt.", []),
    "prompt_embeds": _instead("Send prompt."),
    "mm_processor_kwargs": _OBJECT,
    "media_io_kwargs": _OBJECT,
    "system": _instead("Send a message of the role system."),
    "instructions": _instead("Send a message of the role system."),
    "input": _instead("Send messages."),
    "previous_response_id": _instead("Send the whole conversation in messages."),
    "stop_sequences": _instead("Send stop.", []),
    # The form of the answer.
    "guided_json": _instead(_GRAMMAR),
    "guided_regex": _instead(_GRAMMAR),
    "guided_choice": _instead(_GRAMMAR),
    "guided_grammar": _instead(_GRAMMAR),
    "guided_whitespace_pattern": _instead("Send structured_outputs.whitespace_pattern."),
    "guided_decoding_backend": HINT,
    "structured_outputs": _instead("Send response_format."),
    "json_schema": _instead("Send response_format."),
    "grammar": _instead(_GRAMMAR, ""),
    "ebnf": _instead(_GRAMMAR),
    "regex": _instead(_GRAMMAR),
    "format": _instead("Send response_format."),
    "nvext": _instead("Send its members as fields.", {}),
    "parse_tool_calls": _TRUE,
    "disable_tool_validation": HINT,
    "tool_stream": HINT,
    # Thinking.
    "include_reasoning": HINT,
    "stop_in_reasoning": _FALSE,
    "thinking": _instead(_TEMPLATE),
    "reasoning": _instead("Send reasoning_effort, or chat_template_kwargs."),
    "thinking_budget": _instead("Send reasoning_effort, or lower max_tokens."),
    "thinking_token_budget": _instead("Send reasoning_effort, or lower max_tokens.", -1),
    "reasoning_format": _instead("Send include_reasoning.", "auto", "parsed"),
    "separate_reasoning": _TRUE,
    "stream_reasoning": _TRUE,
    "reasoning_split": _TRUE,
    "prompt_mode": _instead("Send reasoning_effort."),
    # Search, and other work of providers.
    "web_search": _instead(_SEARCH),
    "search_parameters": _instead(_SEARCH),
    "search_settings": _instead(_SEARCH),
    "search_options": _instead(_SEARCH),
    "enable_search": _instead(_SEARCH, False),
    "citation_options": _REFUSED,
    "compound_custom": _REFUSED,
    "translation_options": _instead("Ask for the translation in the prompt."),
    "safe_prompt": _instead("Send a message of the role system.", False),
    "safety_model": _REFUSED,
    "plugins": _LIST,
    "deferred": _instead("Send the header Idempotency-Key, and repeat the request for its answer.", False),
    # Which model or adapter answers, and what other code runs. No dialect has them: the operator decides this.
    "models": _MODEL_CHOICE,
    "route": _MODEL_CHOICE,
    "fallbacks": _MODEL_CHOICE,
    "provider": _instead("Send the headers x-maitred-region and x-maitred-local-only."),
    "lora": _instead("Name the model in model."),
    "lora_path": _instead("Name the model in model."),
    "custom_logit_processor": _OPERATOR,
    "custom_params": _OPERATOR,
    "vllm_xargs": _instead("The operator of this gateway decides it.", {}),
    "session_params": _OPERATOR,
    "kv_transfer_params": _OPERATOR,
    "ec_transfer_params": _OPERATOR,
    "bootstrap_host": _OPERATOR,
    "bootstrap_port": _OPERATOR,
    "bootstrap_room": _OPERATOR,
    "cache_salt": _instead(_SALT),
    "extra_key": _instead(_SALT),
    # How the work is scheduled, cached and reported.
    "priority": HINT,
    "cache": HINT,
    "request_id": HINT,
    "rid": HINT,
    "session_id": HINT,
    "id_slot": HINT,
    "data_parallel_rank": HINT,
    "cache_prompt": HINT,
    "cache_control": HINT,
    "keep_alive": HINT,
    "stream_interval": HINT,
    "timings_per_token": HINT,
    "return_progress": HINT,
    "return_token_offsets": HINT,
    "return_mm_kwargs": HINT,
    "usage": HINT,
}
"""Request fields of chat and text completions, with what becomes of them where they are not honoured."""
COMPLETION_FIELDS: Mapping[str, RequestField] = {
    **FIELDS,
    "add_special_tokens": _instead("Send the prompt as token ids.", True),
}
"""`FIELDS` for text completions: a text gets the special tokens of the model by default."""
LIMIT_FIELDS = frozenset(
    {
        *(name for name, field in FIELDS.items() if field.alternative == _LIMIT.alternative),
        *("max_tokens", "generation_config", "options", "extra_body", "nvext"),
    }
)
"""Fields that set the largest number of output tokens, or can hold such a field.

No server gets them from a client: they would pass by what limits and budgets grant.
"""
MESSAGES_THINKING = "messages.thinking"
"""Name under which a chat completion that stands for a Messages request carries its ``thinking``.

Messages always shows or hides thoughts by it, whatever the model, while a chat client's own ``thinking``, of other
providers, asks the model to think.
"""
_CONTINUING_MEMBERS = frozenset({"prefix", "partial"})
"""Members of a message, of several providers, that ask the model to go on with this message."""
MESSAGE_MEMBERS = frozenset(
    {
        *("role", "content", "name", "tool_call_id", "tool_calls", "function_call", "refusal"),
        *("reasoning_content", "reasoning", "thinking_blocks", "is_error"),
    }
)
"""Members of a message that the structs have."""
_PART_MEMBERS = frozenset({"type", "text"})
MEDIA_PARTS = frozenset({"image_url", "video_url", "input_audio", "audio_url", "file"})
"""Types of the parts of a message that are no text; each has what it holds in the member of that name."""
_TOOL_MEMBERS = frozenset({"type", "function"})
_STREAM_OPTIONS = frozenset({"include_usage"})
_POSITION = re.compile(r"\[\d+\]")
_USAGE_OPTIONS = _STREAM_OPTIONS | {"continuous_usage_stats"}
"""Stream options that are read if the usage is included."""


class UnsupportedFields(NamedTuple):
    """Fields of a request that a target does not honour, as paths."""

    refused: tuple[str, ...] = ()
    """Fields that change the answer."""
    ignored: tuple[str, ...] = ()
    """Hints, which are left out."""


def unsupported_fields(fields: Mapping[str, Any], honoured: Set[str], *, chat: bool) -> UnsupportedFields:
    """Returns the fields of a chat or text completion that a target does not honour.

    Args:
        fields: The fields of the request.
        honoured: The fields that the target honours.
        chat: Whether the request is a conversation.
    """
    return split_unsupported(fields, honoured, FIELDS if chat else COMPLETION_FIELDS)


def split_unsupported(
    fields: Mapping[str, Any], honoured: Set[str], table: Mapping[str, RequestField]
) -> UnsupportedFields:
    """Splits the fields that a target does not honour into those to refuse and those to leave out, by a table."""
    refused, ignored = [], []
    for name in fields:
        if name not in honoured:
            about = table.get(name, HINT)
            if about.refuses(fields[name]):
                refused.append(name)
            elif not about.changes_answer and not _asks_for_nothing(fields[name]):
                ignored.append(name)
    return UnsupportedFields(tuple(refused), tuple(ignored))


def unsupported_members(fields: Mapping[str, Any]) -> UnsupportedFields:
    """Returns the members of messages, tools and stream options that no struct here has.

    Empty members are left out: they ask for nothing.
    """
    refused: list[str] = []
    ignored: dict[str, None] = {}
    for position, message in enumerate(fields.get("messages", ())):
        if not MESSAGE_MEMBERS.issuperset(message):
            refused += [f"messages[{position}].{name}" for name in _CONTINUING_MEMBERS if message.get(name)]
            ignored |= members_beyond("messages", message, MESSAGE_MEMBERS | _CONTINUING_MEMBERS)
        if message.get("content").__class__ is list:
            for part in message["content"]:
                if part.get("type") not in MEDIA_PARTS:
                    ignored |= members_beyond("messages.content", part, _PART_MEMBERS)
    tools = fields.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        ignored |= members_beyond("tools", tool, _TOOL_MEMBERS)
    return UnsupportedFields(tuple(refused), (*ignored, *unsupported_stream_options(fields)))


def media_parts(messages: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the paths of the parts of messages that are no text, such as ``messages[0].content[1].image_url``."""
    return tuple(
        f"messages[{position}].content[{index}].{part['type']}"
        for position, message in enumerate(messages)
        if message.get("content").__class__ is list
        for index, part in enumerate(message["content"])
        if part.get("type") in MEDIA_PARTS
    )


def without_positions(path: str) -> str:
    """Returns a path of a converted request, whose messages have other positions than those that the client wrote."""
    return _POSITION.sub("", path) if path.startswith("messages[") else path


def unsupported_stream_options(fields: Mapping[str, Any]) -> Iterable[str]:
    """Returns the stream options that the gateway leaves out, as paths; it writes the streams of all models."""
    options = fields.get("stream_options")
    includes_usage = isinstance(options, dict) and options.get("include_usage") is True
    return members_beyond("stream_options", options, _USAGE_OPTIONS if includes_usage else _STREAM_OPTIONS)


def members_beyond(path: str, members: object, read: Set[str]) -> dict[str, None]:
    """Returns the paths of members that are not read, without those that ask for nothing; for a value of any type."""
    if not isinstance(members, dict):
        return {}
    return {
        f"{path}.{name}": None for name, value in members.items() if name not in read and not _asks_for_nothing(value)
    }


def _asks_for_nothing(value: object) -> bool:
    """Returns whether leaving this value of a hint out loses nothing, so that it need not be named."""
    return value is None or value is False or value in ("", [], {})


def refuse(field: str, problem: str, table: Mapping[str, RequestField] = FIELDS) -> Unsupported:
    """Makes the error for a field that changes the answer and that its target does not honour.

    Args:
        field: The field, as a path.
        problem: What is wrong with it at the target, such as "is not known to the server".
        table: The fields of the API.
    """
    about = table.get(field, _REFUSED)
    if "." in field and field.rpartition(".")[2] in MEDIA_PARTS:
        about = _MEDIA
    elif field.startswith("messages["):
        about = _CONTINUING
    remedy = f"{about.alternative} Otherwise remove it." if about.alternative else "Remove it."
    return Unsupported(f"{field} {problem}. {remedy}", param=field)


EMBEDDING_FIELDS: Mapping[str, RequestField] = {
    **dict.fromkeys(("input_type", "task", "task_type", "prompt_name", "instruction"), _instead(_INSTRUCT)),
    **dict.fromkeys(("truncate", "truncation"), _instead("Send truncate_prompt_tokens.", False, "NONE")),
    "normalize": _instead("Divide the vectors by their lengths yourself."),
    "use_activation": _REFUSED,
    "embed_dtype": _instead("Send encoding_format.", "float32"),
    "output_dtype": _instead("Send encoding_format.", "float"),
    "embedding_types": _instead("Send encoding_format.", ["float"]),
    "endianness": RequestField(neutral_values=("native", "little")),
    "output_dimension": _instead("Send dimensions."),
    "late_chunking": _FALSE,
    "add_special_tokens": _instead("Send the input as token ids.", True),
    "chat_template": _instead("Send input."),
    "mm_processor_kwargs": _OBJECT,
    "media_io_kwargs": _OBJECT,
    "cache_salt": _instead(_SALT),
    "request_id": HINT,
}
"""Request fields of embeddings that this server does not honour."""
TOKENIZE_FIELDS: Mapping[str, RequestField] = {
    "return_token_strs": _instead("Send the tokens to /detokenize.", False),
    "mm_processor_kwargs": _OBJECT,
    "media_io_kwargs": _OBJECT,
}
"""Request fields of `/tokenize` that this server does not honour."""
