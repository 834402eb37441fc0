"""vLLM's flags on the command line of `maitred serve`: each is translated, left out with a word, or refused.

Whoever has a start script for `vllm serve` can change the first two words of it. What a flag became is said in one line
each, so that the script can be changed for good. None is left out in silence. The names are those of vLLM's own
documentation of its engine and server arguments (docs.vllm.ai, 0.6 to 0.15).
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from maitred.core.errors import ConfigInvalid

API_KEY_VARIABLE = "MAITRED_VLLM_API_KEY"
"""Variable by which keys of `--api-key` are given to this process and its children; the number of the key follows."""

Settings = Mapping[str, object]
"""Dotted name of a setting -> its value."""


class Translation(NamedTuple):
    """Translation of the words of a command line.

    Attributes:
        words: The words for `maitred serve`.
        hints: What to say about vLLM's flags, a line each.
        environment: Variables to set; they hold secrets.
    """

    words: list[str]
    hints: list[str]
    environment: dict[str, str]


class _Unfit(Exception):
    """A flag or its value has no counterpart; the message says what to do."""


class _Rule(NamedTuple):
    """Rule for one flag of vLLM: what becomes of it.

    Attributes:
        values: How many values it has: ``""`` none, ``1``, ``?`` at most one, ``+`` one or more.
        to_settings: Makes settings of its values; None: it is left out.
        note: What else to say; for a flag that is left out, why nothing is lost.
        model: Whether its value is the model.
    """

    values: str
    to_settings: Callable[[Sequence[str]], Settings] | None = None
    note: str = ""
    model: bool = False


def translate_vllm_flags(words: Sequence[str]) -> Translation:
    """Translates vLLM's flags among the words behind `maitred serve`. All other words stay as they are.

    Raises:
        ConfigInvalid: Flags or values have no counterpart; the message has a sentence for each.
    """
    translation = Translation([], [], {})
    faults: list[str] = []
    model: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        written, equals, value = word.partition("=")
        name = _SHORT.get(written, written.replace("_", "-"))
        rule = _RULES.get(name)
        if word == "--":
            translation.words.extend([word, *rest])
            break
        if rule is None:
            if name in _SHARED_VALUES:
                value = value if equals else (rest.pop(0) if rest else "")
                value = _shared_value(name, value, translation, faults)
                translation.words.extend([name, value] if value else [name])
            else:
                translation.words.append(word)
            continue
        values = [value] if equals else _take(rule.values, rest)
        if rule.values in ("1", "+") and not values:
            faults.append(f"{written} needs a value.")
            continue
        try:
            settings = {} if rule.to_settings is None else rule.to_settings(values)
        except _Unfit as unfit:
            faults.append(f"{' '.join([written, *_show_values(name, values)])}: {unfit}")
            continue
        if rule.model:
            model += values
            settings = {}
        _add(translation, written, settings, rule, values)
    if faults:
        lines = "\n  ".join(faults)
        raise ConfigInvalid(f"These flags of vLLM have no counterpart as they stand:\n  {lines}")
    return translation._replace(words=[*model, *translation.words])


def _add(translation: Translation, written: str, settings: Settings, rule: _Rule, values: Sequence[str]) -> None:
    """Adds what a flag became, and the line about it."""
    if rule.model:
        translation.hints.append(f"{written} is vLLM's name; here the model stands alone: maitred serve {values[0]}")
        return
    shown = []
    for setting, value in settings.items():
        if setting.startswith("$"):
            translation.environment[setting[1:]] = str(value)
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        translation.words.extend(["--set", f"{setting}={text}"])
        shown.append(f"--set {setting}={text}")
    note = f" {rule.note}" if rule.note else ""
    if shown:
        translation.hints.append(f"{written} is vLLM's name; here it is {' '.join(shown)}.{note}")
    else:
        translation.hints.append(f"{written} is left out.{note}")


def _take(values: str, rest: list[str]) -> list[str]:
    """Takes the values of a flag from the words behind it."""
    taken: list[str] = []
    while rest and values and (values == "+" or not taken):
        is_flag = rest[0].startswith("-") and not rest[0].lstrip("-").replace(".", "", 1).isdigit()
        if is_flag:
            break
        taken.append(rest.pop(0))
    return taken


def _show_values(name: str, values: Iterable[str]) -> list[str]:
    return ["***"] if name in _SECRET else list(values)


def _shared_value(name: str, value: str, translation: Translation, faults: list[str]) -> str:
    """Returns the value of a flag that both have, in our words."""
    own = _SHARED_VALUES[name].get(value.lower())
    if own is None:
        return value
    if not own:
        faults.append(f"{name} {value}: {_NOT_HERE[name]}")
        return value
    translation.hints.append(f"{name} {value} is vLLM's name; here it is {name} {own}.")
    return own


# --- values ---


def _same(setting: str) -> Callable[[Sequence[str]], Settings]:
    """Makes a setting with the value as it is."""
    return lambda values: {setting: values[0]}


def _constant(setting: str, value: object) -> Callable[[Sequence[str]], Settings]:
    return lambda values: {setting: value}


def _words(setting: str, known: Mapping[str, str], what_to_do: str) -> Callable[[Sequence[str]], Settings]:
    """Makes a setting of words that are others here; an empty one says nothing."""

    def to_settings(values: Sequence[str]) -> Settings:
        word = known.get(values[0].lower())
        if word is None:
            raise _Unfit(what_to_do)
        return {setting: word} if word else {}

    return to_settings


def _only(allowed: Iterable[str], what_to_do: str) -> Callable[[Sequence[str]], Settings]:
    """Makes nothing of values that change nothing here."""
    return _words("", dict.fromkeys(allowed, ""), what_to_do)


def _refuse(what_to_do: str) -> Callable[[Sequence[str]], Settings]:
    def to_settings(values: Sequence[str]) -> Settings:
        raise _Unfit(what_to_do)

    return to_settings


def _context(values: Sequence[str]) -> Settings:
    """Reads a length: ``4096``, ``16k`` (thousands), ``16K`` (1,024), ``auto`` or -1."""
    text = values[0]
    if text in ("auto", "-1"):
        return {}
    factors = {"k": 1_000, "K": 1_024, "m": 1_000_000, "M": 1_048_576}
    factor = factors.get(text[-1:], 1)
    try:
        return {"engine.context_tokens": round(float(text[:-1] if factor > 1 else text) * factor)}
    except ValueError:
        raise _Unfit("it must be a number of tokens, such as 8192 or 16k.") from None


def _gibibytes(setting: str) -> Callable[[Sequence[str]], Settings]:
    def to_settings(values: Sequence[str]) -> Settings:
        try:
            return {setting: round(float(values[0]) * (1 << 30))}
        except ValueError:
            raise _Unfit("it must be a number of GiB.") from None

    return to_settings


def _names(values: Sequence[str]) -> Settings:
    """Serves under the first name; the others are aliases of it."""
    first, *others = [name for value in values for name in value.split(",")] if len(values) == 1 else values
    if dotted := [name for name in others if "." in name]:
        raise _Unfit(f"declare {', '.join(dotted)} in the configuration, as `routing.aliases`: its name has a dot.")
    return {"model.served_name": first, **{f"routing.aliases.{name}": first for name in others if name != first}}


def _api_keys(values: Sequence[str]) -> Settings:
    """Declares keys, which come by variables: the words of a command line are for all of the machine to read."""
    settings: dict[str, object] = {"server.allow_unauthenticated": "false"}
    for number, value in enumerate(values, start=1):
        variable, key = f"{API_KEY_VARIABLE}_{number}", f"tenants.vllm.keys.vllm-{number}"
        settings |= {f"${variable}": value, f"{key}.foreign": "true", f"{key}.secret.env": variable}
    return settings


def _speculation(values: Sequence[str]) -> Settings:
    """Reads vLLM's JSON of drafts."""
    try:
        fields: Any = json.loads(values[0])
    except ValueError:
        raise _Unfit('it must be JSON, such as \'{"method": "ngram", "num_speculative_tokens": 5}\'.') from None
    if not isinstance(fields, dict):
        raise _Unfit("it must be a JSON object.")
    method, model = fields.get("method"), fields.get("model")
    tokens = fields.get("num_speculative_tokens")
    settings: dict[str, object] = {} if tokens is None else {"engine.speculation.most_tokens": tokens}
    if method in ("ngram", "[ngram]") or model in ("ngram", "[ngram]"):
        return {"engine.speculation.method": "ngram", **settings}
    if method in (None, "draft_model") and model:
        return {"engine.speculation.method": "draft_model", "engine.speculation.draft_model": model, **settings}
    raise _Unfit("drafts are guessed by `ngram` or by a smaller `model` here; see docs/speculation.md.")


def _one_or_replicas(values: Sequence[str]) -> Settings:
    if values[0] == "1":
        return {}
    raise _Unfit(
        "a model is computed whole by one engine here. For more requests, start several with --replicas; a model that "
        "does not fit one device needs another server, which `upstreams` can name."
    )


def _origins(values: Sequence[str]) -> Settings:
    try:
        return {"server.cors_origins": json.loads(values[0])}
    except ValueError:
        return {"server.cors_origins": list(values)}


_QUANTISED = (
    "weights are rounded when they are loaded: --set engine.quantization=int8 (or int4, fp8). Checkpoints of AWQ, GPTQ "
    "and bitsandbytes are not read; take the unquantised one, or a GGUF file."
)
_TOOL_PARSER = (
    "tools are read as the chat template shows (auto), or by --set model.tool_parser=hermes, llama3_json, mistral."
)
_REASONING = "thoughts are read as the chat template shows (auto), or by --set model.reasoning_parser=think."
_TLS = "put a proxy that speaks TLS before it, and let it listen on this machine."
_LORA = "adapters are not loaded. Merge the adapter into its model, and serve the result."
_FOLDER = "a model is its folder here. Put the file into it, or a copy of it."
_MEDIA = "models here read text. Name a server that reads pictures as an upstream."
_KERNELS = "Kernels are chosen by measuring, or by `engine.gpu.attention`."
_ALWAYS = "It is always so here."
_LOGS = "Requests are logged in one line each, without their text; see `log.level`."
_GRAMMARS = "Grammars are compiled by maitred itself; see docs/structured-output.md."
_COMPILED = "Nothing is compiled by torch; see `engine.gpu.graph_sequences` for graphs."

_RULES: dict[str, _Rule] = {
    "--model": _Rule("1", model=True),
    "--max-model-len": _Rule("1", _context),
    "--max-num-seqs": _Rule("1", _same("engine.max_sequences")),
    "--max-num-batched-tokens": _Rule("1", _same("engine.step_tokens")),
    "--gpu-memory-utilization": _Rule("1", _same("engine.gpu.memory_fraction"), "On a CPU see `--kv-memory`."),
    "--kv-cache-memory-bytes": _Rule("1", _same("engine.kv_memory_bytes")),
    "--kv-cache-dtype": _Rule(
        "1",
        _words(
            "engine.kv_dtype",
            {"auto": "auto", "bfloat16": "bf16", **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), "int8")},
            "the KV cache has fp32, bf16 or int8: --set engine.kv_dtype=int8.",
        ),
        "8 bits are integers with a scale here.",
    ),
    "--quantization": _Rule(
        "1",
        _words("engine.quantization", {"fp8": "fp8", "none": "none", "gguf": "", "int8": "int8"}, _QUANTISED),
    ),
    "--served-model-name": _Rule("+", _names),
    "--api-key": _Rule("+", _api_keys, "Declare it in `tenants` for good: the words of a command line are no secret."),
    "--enable-prefix-caching": _Rule("", _constant("engine.prefix_cache", "true")),
    "--no-enable-prefix-caching": _Rule("", _constant("engine.prefix_cache", "false")),
    "--tensor-parallel-size": _Rule("1", _one_or_replicas, "One engine computes the whole model."),
    "--pipeline-parallel-size": _Rule("1", _one_or_replicas, "One engine computes the whole model."),
    "--data-parallel-size": _Rule("1", _same("model.replicas")),
    "--api-server-count": _Rule("1", _same("server.workers")),
    "--block-size": _Rule("1", _same("engine.block_tokens")),
    "--swap-space": _Rule("1", _gibibytes("engine.swap_bytes")),
    "--cpu-offload-gb": _Rule(
        "1", _only(("0", "0.0"), "weights are not kept elsewhere. Round them: engine.quantization.")
    ),
    "--seed": _Rule("1", None, "A request names its own `seed`; one without it draws one."),
    "--tokenizer": _Rule("1", _refuse(_FOLDER)),
    "--tokenizer-mode": _Rule(
        "1", _only(("auto", "hf", "slow"), _FOLDER), "The tokenizer is that of the model's folder."
    ),
    "--tokenizer-revision": _Rule("1", _refuse(_FOLDER)),
    "--skip-tokenizer-init": _Rule("", _refuse("prompts and answers are texts here.")),
    "--chat-template": _Rule(
        "1",
        _refuse("put it into the model's folder as chat_template.jinja, or send `chat_template` with each request."),
    ),
    "--chat-template-content-format": _Rule("1", None, "It is seen from the template."),
    "--trust-request-chat-template": _Rule("", _constant("model.trust_request_chat_template", "true")),
    "--default-chat-template-kwargs": _Rule("1", _refuse("send `chat_template_kwargs` with each request.")),
    "--trust-remote-code": _Rule("", None, "No code of a model is run; docs/models.md lists what is read."),
    "--enable-auto-tool-choice": _Rule("", None, _ALWAYS),
    "--tool-call-parser": _Rule(
        "1",
        _words(
            "model.tool_parser",
            {name: name for name in ("auto", "none", "hermes", "llama3_json", "mistral")},
            _TOOL_PARSER,
        ),
    ),
    "--tool-parser-plugin": _Rule("1", _refuse(_TOOL_PARSER)),
    "--enable-reasoning": _Rule("", None, _ALWAYS),
    "--reasoning-parser": _Rule(
        "1",
        _words("model.reasoning_parser", dict.fromkeys(("deepseek_r1", "qwen3", "think"), "think"), _REASONING),
    ),
    "--speculative-config": _Rule("1", _speculation),
    "--speculative-model": _Rule(
        "1",
        lambda values: (
            {"engine.speculation.method": "ngram"}
            if values[0] in ("[ngram]", "ngram")
            else {"engine.speculation.method": "draft_model", "engine.speculation.draft_model": values[0]}
        ),
    ),
    "--num-speculative-tokens": _Rule("1", _same("engine.speculation.most_tokens")),
    "--generation-config": _Rule(
        "1",
        _words("model.generation_config", {"auto": "auto", "vllm": "none"}, _FOLDER),
    ),
    "--override-generation-config": _Rule("1", _refuse("change generation_config.json in the model's folder.")),
    "--uvicorn-log-level": _Rule(
        "1",
        _words(
            "log.level",
            {"trace": "debug", "critical": "error", **{name: name for name in ("debug", "info", "warning", "error")}},
            "log.level is debug, info, warning or error.",
        ),
    ),
    "--allowed-origins": _Rule("1", _origins),
    "--otlp-traces-endpoint": _Rule("1", _same("traces.endpoint")),
    "--distributed-executor-backend": _Rule(
        "1",
        lambda values: {"model.backend": "ray"} if values[0] == "ray" else {},
        "An engine is a process of its own.",
    ),
    "--task": _Rule(
        "1",
        lambda values: (
            {"engine.pooling": "auto"}
            if values[0] in ("embed", "embedding")
            else _only(("auto", "generate"), "models here generate or embed.")(values)
        ),
    ),
    "--runner": _Rule(
        "1",
        lambda values: (
            {"engine.pooling": "auto"}
            if values[0] == "pooling"
            else _only(("auto", "generate"), "models here generate or embed.")(values)
        ),
    ),
    "--load-format": _Rule(
        "1", _only(("auto", "safetensors", "gguf"), "weights are read from safetensors and GGUF files."), _ALWAYS
    ),
    "--scheduling-policy": _Rule("1", None, "Callers have fair shares and priorities; see `dispatch.line`."),
    "--ssl-keyfile": _Rule("1", _refuse(_TLS)),
    "--ssl-certfile": _Rule("1", _refuse(_TLS)),
    "--ssl-ca-certs": _Rule("1", _refuse(_TLS)),
    "--root-path": _Rule("1", _refuse("let the proxy before it take the prefix off.")),
    "--middleware": _Rule("1", _refuse("put it into a proxy before the gateway.")),
    "--download-dir": _Rule("1", _refuse("set HF_HOME: models of the hub are found in its cache.")),
    "--revision": _Rule("1", _refuse("fetch that revision into a folder, and serve the folder.")),
    "--hf-token": _Rule("?", _refuse("set HF_TOKEN: the words of a command line are no secret.")),
    "--hf-overrides": _Rule("1", _refuse("change config.json in the model's folder.")),
    "--rope-scaling": _Rule("1", _refuse("change config.json in the model's folder.")),
    "--num-gpu-blocks-override": _Rule("1", _refuse("say how much memory the KV cache has: --kv-memory 8GiB.")),
    "--kv-transfer-config": _Rule("1", _refuse("an engine prefills and decodes by itself.")),
    "--disable-sliding-window": _Rule(
        "", _refuse("a window is a part of the model: lower the length, --max-model-len.")
    ),
    "--return-tokens-as-token-ids": _Rule("", _refuse("ask for it with each request: `return_tokens_as_token_ids`.")),
    "--max-logprobs": _Rule("1", None, "A request may ask for as many as its model has."),
    "--lora-modules": _Rule("+", _refuse(_LORA)),
    **{name: _Rule("", _refuse(_LORA)) for name in ("--enable-lora", "--enable-lora-bias", "--fully-sharded-loras")},
    **{
        name: _Rule("1", _refuse(_LORA))
        for name in ("--max-loras", "--max-lora-rank", "--max-cpu-loras", "--lora-dtype")
    },
    **{
        name: _Rule("1", _refuse(_MEDIA))
        for name in ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path")
    },
    **{
        name: _Rule("", None, _LOGS)
        for name in (
            *("--disable-log-requests", "--no-enable-log-requests", "--enable-log-requests", "--disable-log-stats"),
            *("--disable-uvicorn-access-log", "--enable-log-outputs", "--disable-fastapi-docs"),
        )
    },
    "--max-log-len": _Rule("1", None, _LOGS),
    **{
        name: _Rule("", None, _ALWAYS)
        for name in (
            *("--enable-chunked-prefill", "--async-scheduling", "--use-v2-block-manager", "--enable-sleep-mode"),
            *("--enable-prompt-tokens-details", "--enable-server-load-tracking", "--disable-frontend-multiprocessing"),
            *("--enable-request-id-headers", "--language-model-only", "--enable-force-include-usage"),
        )
    },
    "--no-enable-chunked-prefill": _Rule(
        "", _refuse("a prompt is computed in steps of engine.step_tokens; raise these.")
    ),
    "--enforce-eager": _Rule("", _constant("engine.gpu.graph_sequences", "0")),
    **{
        name: _Rule("1", None, _COMPILED)
        for name in ("--compilation-config", "--max-seq-len-to-capture", "--optimization-level", "--cuda-graph-sizes")
    },
    "--attention-backend": _Rule("1", None, _KERNELS),
    **{
        name: _Rule("1", None, _GRAMMARS)
        for name in ("--guided-decoding-backend", "--structured-outputs-config", "--response-role")
    },
    **{
        name: _Rule("1", None, "It has no effect here.")
        for name in (
            "--preemption-mode",
            "--stream-interval",
            "--collect-detailed-traces",
            "--max-parallel-loading-workers",
        )
    },
}
"""Flag of vLLM -> what becomes of it. Flags that both have are not here, or in `_SHARED_VALUES`."""
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-O": "--optimization-level",
}
_SECRET = frozenset({"--api-key", "--hf-token"})
_SHARED_VALUES: dict[str, dict[str, str]] = {
    "--dtype": {"bfloat16": "bf16", "float32": "fp32", "float": "fp32", "half": "", "float16": ""},
    "--device": {"gpu": "cuda"},
}
"""Flag that both have -> vLLM's value -> ours; empty: there is none."""
_NOT_HERE = {"--dtype": "numbers have fp32 or bf16 here: --dtype bf16 takes as much memory."}


def apply_vllm_flags(words: Sequence[str], say: Callable[[str], object]) -> list[str]:
    """Translates vLLM's flags, says what became of them, and sets the variables that hold their secrets."""
    translation = translate_vllm_flags(words)
    for hint in translation.hints:
        say(hint)
    os.environ.update(translation.environment)
    return translation.words
