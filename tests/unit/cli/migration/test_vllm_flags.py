"""vLLM's flags: each becomes a setting, is left out with a word, or is refused with what to do."""

import re
from itertools import pairwise

import pytest

from maitred.cli.migration.vllm_flags import _RULES, translate_vllm_flags
from maitred.config.loader import load
from maitred.config.sources import Flag
from maitred.core.errors import ConfigInvalid

TYPICAL = """
    Qwen/Qwen2.5-0.5B-Instruct --host 0.0.0.0 --port 8001 --served-model-name qwen small --max-model-len 16k
    --gpu-memory-utilization 0.85 --max-num-seqs=64 --max_num_batched_tokens 2048 --dtype bfloat16 --kv-cache-dtype fp8
    --enable-prefix-caching --tensor-parallel-size 1 -dp 2 --block-size 16 --swap-space 4 --seed 0 --trust-remote-code
    --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --uvicorn-log-level warning
    --disable-log-requests --enable-chunked-prefill --generation-config vllm --api-key token-abc123 token-def456
"""


def overrides_of(words):
    """The configuration that the settings among the words make."""
    overrides = {}
    for flag, assignment in pairwise(words):
        if flag == "--set":
            key, _, value = assignment.partition("=")
            overrides[key] = Flag("--set", value)
    return overrides


def test_a_start_script_becomes_ours():
    translation = translate_vllm_flags(TYPICAL.split())
    assert translation.words[:5] == ["Qwen/Qwen2.5-0.5B-Instruct", "--host", "0.0.0.0", "--port", "8001"]
    assert translation.words[translation.words.index("--dtype") + 1] == "bf16"
    config = load(None, translation.environment, overrides_of(translation.words)).config
    engine = config.engine
    assert (engine.context_tokens, engine.max_sequences, engine.step_tokens) == (16_000, 64, 2048)
    assert (engine.gpu.memory_fraction, engine.kv_dtype, engine.block_tokens) == (0.85, "int8", 16)
    assert (engine.prefix_cache, engine.swap_bytes) == (True, 4 << 30)
    assert (config.model.served_name, config.routing.aliases) == ("qwen", {"small": "qwen"})
    assert (config.model.replicas, config.model.tool_parser, config.model.reasoning_parser) == (2, "hermes", "think")
    assert (config.model.generation_config, config.log.level) == ("none", "warning")
    keys = config.tenants["vllm"].keys
    assert [key.secret.reveal() for key in keys.values()] == ["token-abc123", "token-def456"]
    assert all(key.foreign for key in keys.values())
    assert not config.server.serves_anyone


def test_each_flag_has_a_line_and_no_secret_is_in_one():
    translation = translate_vllm_flags(TYPICAL.split())
    assert "--max-model-len is vLLM's name; here it is --set engine.context_tokens=16000." in translation.hints
    assert "--dtype bfloat16 is vLLM's name; here it is --dtype bf16." in translation.hints
    assert "--enable-auto-tool-choice is left out. It is always so here." in translation.hints
    assert not re.search("token-(abc|def)", " ".join([*translation.hints, *translation.words]))
    flags = [word for word in TYPICAL.split() if word.startswith("-") and word not in ("--host", "--port")]
    assert len(translation.hints) == len(flags)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (
            '--model m --speculative-config {"method":"ngram","num_speculative_tokens":5}',
            ["method=ngram", "most_tokens=5"],
        ),
        ('--speculative-config {"model":"small"}', ["method=draft_model", "draft_model=small"]),
        ("--no-enable-prefix-caching", ["engine.prefix_cache=false"]),
        ("--quantization fp8", ["engine.quantization=fp8"]),
        ("--task embed", ["engine.pooling=auto"]),
        ("--enforce-eager", ["engine.gpu.graph_sequences=0"]),
        ("--distributed-executor-backend ray", ["model.backend=ray"]),
        ('--allowed-origins ["https://a.example"]', ['server.cors_origins=["https://a.example"]']),
        ("--max-model-len 8K", ["engine.context_tokens=8192"]),
        ("--max-model-len auto", []),
    ],
)
def test_values_are_translated(words, settings):
    written = [word for word in translate_vllm_flags(words.split()).words if "=" in word]
    assert [any(setting in word for word in written) for setting in settings] == [True] * len(settings)
    assert len(written) == len(settings)


@pytest.mark.parametrize(
    ("words", "what_to_do"),
    [
        ("--tensor-parallel-size 4", "--replicas"),
        ("--quantization awq", "engine.quantization=int8"),
        ("--tokenizer other", "folder"),
        ("--chat-template ./t.jinja", "chat_template.jinja"),
        ("--enable-lora --lora-modules a=b", "Merge the adapter"),
        ("--dtype float16", "bf16"),
        ("--tool-call-parser pythonic", "model.tool_parser"),
        ('--speculative-config {"method":"eagle"}', "ngram"),
        ("--max-model-len long", "16k"),
        ("--max-num-seqs", "needs a value"),
        ("--hf-token hf_secret", "HF_TOKEN"),
        ("--ssl-keyfile k", "proxy"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_to_do(words, what_to_do):
    with pytest.raises(ConfigInvalid, match=re.escape(what_to_do)) as refused:
        translate_vllm_flags(words.split())
    assert "hf_secret" not in refused.value.message


def test_all_refusals_are_told_at_once():
    with pytest.raises(ConfigInvalid) as refused:
        translate_vllm_flags(["--tokenizer", "t", "--enable-lora", "--port", "1"])
    assert refused.value.message.count("\n") == 2


def test_words_of_ours_stay_as_they_are():
    words = ["./model", "--kv-memory", "4GiB", "--set", "a.b=c", "--unheard-of", "--engine=tcp:h:1", "--dtype", "bf16"]
    translation = translate_vllm_flags(words)
    assert (translation.words, translation.hints) == (words, [])


@pytest.mark.parametrize("name", sorted(_RULES))
def test_every_rule_says_something(name):
    rule = _RULES[name]
    assert rule.to_settings is not None or rule.model or len(rule.note) > 10
