"""The bundled tokenizer with the markers and the chat template of each family that calls tools, and models to it."""

import json
from pathlib import Path

from maitred.config.tree import BUNDLED_MODEL
from maitred.text.tokenizer import Tokenizer
from tests.support.models import make_model

_HERMES = """
{%- if tools %}
    {{- '<|system|># Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nWrite <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>.<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response><|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

_LLAMA = """
{%- if tools is not none %}
    {{- '<|system|>Environment: ipython\\nRespond as {"name": function name, "parameters": dictionary}.\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|user|>ipython:' + (message.content | tojson) + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|assistant|>{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + (message.content | trim) + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

_MISTRAL = """
{%- if tools %}{{- '<|system|>[AVAILABLE_TOOLS]' + (tools | tojson) + '<|end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '<|user|>[TOOL_RESULTS]' + message.tool_call_id + message.content + '<|end|>' }}
    {%- elif message.tool_calls %}
        {{- '<|assistant|>' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- CALL }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

_OLD_CALL = """'[TOOL_CALLS] [{"name": "' + call.function.name + '", "arguments": ' + (GIVEN) + '}]'""".replace(
    "GIVEN", "call.function.arguments | tojson"
)
_NEW_CALL = "'[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson)"
_THINKING = _HERMES.replace("'<|assistant|>' }}", "'<|assistant|><think>\\n' }}{#- </think> #}")

TEMPLATES = {
    "hermes": _HERMES,
    "thinking": _THINKING,
    "llama": _LLAMA,
    "mistral": _MISTRAL.replace("CALL", _NEW_CALL),
    "old_mistral": _MISTRAL.replace("CALL", _OLD_CALL),
}
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "thinking": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "old_mistral": ("[TOOL_CALLS]",),
}
_HIDDEN = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
"""Markers that are special tokens in the published vocabularies; the others show in text."""


def save_tool_tokenizer(folder: Path, family: str) -> Tokenizer:
    """Puts the family's tokenizer into a folder and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    first = len(backend["model"]["vocab"])
    for number, marker in enumerate(MARKERS[family]):
        options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        backend["added_tokens"].append(
            {"id": first + number, "content": marker, "special": marker in _HIDDEN, **options}
        )
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    config = json.loads((BUNDLED_MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATES[family]}))
    return Tokenizer.load(folder)


def make_tool_model(folder: Path, family: str) -> Path:
    """A random model of a few thousand weights that reads and writes as the family does."""
    tokenizer = save_tool_tokenizer(folder, family)
    make_model(
        folder, "llama3", vocab_size=tokenizer.vocab_size, eos_token_id=4, bos_token_id=0, max_position_embeddings=4096
    )
    return folder
