"""Families of decoders: how the fields of each family's ``config.json`` become those of `ModelConfig`.

A family is a function from the fields of the file to the traits in which it differs from a plain Llama. Defaults are
those of the family's configuration in `transformers`, because published files leave out what equals them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from maitred.core.errors import ConfigInvalid
from maitred.engine.models.rotary_config import parse_rotary

_WINDOW_TOKENS = 4096
"""Sliding window of a model whose configuration does not name one."""
_QWEN_FULL_LAYERS = 28
"""Layers of a Qwen model that attend to the whole context, where its configuration does not name their number."""
_LOCAL = "sliding_attention"
_LAYER_KINDS = (_LOCAL, "full_attention")
_TANH_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu")
"""Names of GELU by tanh in files of the Gemma family. Early files say `gelu` and mean it too."""

Fields = Mapping[str, Any]
Traits = dict[str, Any]

_GEMMA_DEFAULTS: Fields = {"head_dim": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "vocab_size": 256_000}
_GEMMA2_DEFAULTS: Fields = {
    **_GEMMA_DEFAULTS,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": _WINDOW_TOKENS,
    "sliding_window_pattern": 2,
}
_GEMMA3_DEFAULTS: Fields = {
    **_GEMMA_DEFAULTS,
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": _WINDOW_TOKENS,
    "sliding_window_pattern": 6,
    "eos_token_id": 1,
}
_GEMMA3_BASES = (1_000_000.0, 10_000.0)
"""Rotary bases of Gemma 3's layers with the whole context, and of those with a window."""


def _llama(fields: Fields) -> Traits:
    attention_bias = bool(fields.get("attention_bias", False))
    return {"qkv_bias": attention_bias, "output_bias": attention_bias, "mlp_bias": bool(fields.get("mlp_bias", False))}


def _mistral(fields: Fields) -> Traits:
    return {"windows": _windows(fields, fields.get("sliding_window", _WINDOW_TOKENS))}


def _qwen2(fields: Fields) -> Traits:
    return {"qkv_bias": True, "windows": _qwen_windows(fields)}


def _qwen3(fields: Fields) -> Traits:
    attention_bias = bool(fields.get("attention_bias", False))
    windows = _qwen_windows(fields)
    return {"qkv_bias": attention_bias, "output_bias": attention_bias, "head_norms": True, "windows": windows}


def _phi3(fields: Fields) -> Traits:
    return {"windows": _windows(fields, fields.get("sliding_window"))}


def _smollm3(fields: Fields) -> Traits:
    layers = int(fields["num_hidden_layers"])
    interval = int(fields.get("no_rope_layer_interval", 4))
    rotates = fields.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    unrotated = tuple(layer for layer in range(layers) if not rotates[layer])
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    kinds = fields.get("layer_types") or [_LOCAL if layer in unrotated else "full_attention" for layer in range(layers)]
    return {**_llama(fields), "unrotated": unrotated, "windows": _windows({**fields, "layer_types": kinds}, window)}


def _gemma(fields: Fields) -> Traits:
    """Traits of all Gemma models, and the whole of the first ones."""
    if fields.get("use_bidirectional_attention"):
        raise ConfigInvalid(
            "use_bidirectional_attention is true: this model reads texts in both directions and writes none, and "
            "maitred has only such models of the BERT family. Use a model that generates."
        )
    attention_bias = bool(fields.get("attention_bias", False))
    return {
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "activation": "gelu_tanh",
        "gain_offset": 0.0 if fields.get("norm_gains_include_one") else 1.0,
        "embedding_scale": float(fields["hidden_size"]) ** 0.5,
    }


def _gemma2(fields: Fields) -> Traits:
    return {
        **_gemma(fields),
        "sandwich_norms": True,
        "score_scale": float(fields["query_pre_attn_scalar"]) ** -0.5,
        "score_cap": float(fields.get("attn_logit_softcapping") or 0.0),
        "logit_cap": float(fields.get("final_logit_softcapping") or 0.0),
        "windows": _gemma_windows(fields),
    }


def _gemma3(fields: Fields) -> Traits:
    rope = fields.get("rope_parameters") or {}
    base, local_base = _GEMMA3_BASES
    if rope and not any(isinstance(value, dict) for value in rope.values()):
        rope = {"full_attention": rope}
    of_whole = rope.get("full_attention") or fields.get("rope_scaling") or {}
    of_local = {"rope_theta": fields.get("rope_local_base_freq") or local_base, **(rope.get(_LOCAL) or {})}
    return {
        **_gemma2(fields),
        "head_norms": True,
        "rotary": parse_rotary(of_whole, fields, base),
        "local_rotary": parse_rotary(of_local, fields),
    }


_FAMILIES: dict[str, tuple[Callable[[Fields], Traits], Fields]] = {
    "LlamaForCausalLM": (_llama, {}),
    "MistralForCausalLM": (_mistral, {}),
    "Qwen2ForCausalLM": (_qwen2, {}),
    "Qwen3ForCausalLM": (_qwen3, {"head_dim": 128}),
    "Phi3ForCausalLM": (_phi3, {}),
    "SmolLM3ForCausalLM": (_smollm3, {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}),
    "GemmaForCausalLM": (_gemma, {**_GEMMA_DEFAULTS, "max_position_embeddings": 8192}),
    "Gemma2ForCausalLM": (_gemma2, _GEMMA2_DEFAULTS),
    "Gemma3ForCausalLM": (_gemma3, _GEMMA3_DEFAULTS),
}
"""Architecture -> its traits, and the fields that its files may leave out."""
_OTHER_NAMES = {
    **{name.replace("ForCausalLM", "Model"): name for name in _FAMILIES},
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
}
"""Further names of these architectures: of a model that was saved without its head, for embeddings, and of one with
parts for images, whose part for texts is run."""


def supported_architectures() -> list[str]:
    """Returns the names of the architectures that generate text."""
    return sorted(_FAMILIES)


def read_family(fields: Fields) -> tuple[Fields, Traits]:
    """Returns the fields of a ``config.json``, with the defaults of its family, and the family's traits.

    Raises:
        ConfigInvalid: maitred does not run such models.
    """
    architecture = (fields.get("architectures") or ["none named"])[0]
    family = _FAMILIES.get(_OTHER_NAMES.get(architecture, architecture))
    if family is None:
        raise ConfigInvalid(
            f"The architecture {architecture} is not supported. Supported: {', '.join(supported_architectures())}."
        )
    traits, defaults = family
    of_text = fields.get("text_config")
    whole = {**defaults, **fields, **of_text} if isinstance(of_text, Mapping) else {**defaults, **fields}
    _check_activation(architecture, whole)
    found = traits(whole)
    if "rotary" not in found:
        rope = whole.get("rope_parameters") or whole.get("rope_scaling") or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise ConfigInvalid(
                f"rope_parameters gives kinds of layers rotary embeddings of their own, which is supported for Gemma 3 "
                f"only, not for {architecture}. Use a checkpoint with one set of rope_parameters."
            )
        found["rotary"] = parse_rotary(rope, whole)
    if found["rotary"].share != 1.0 and traits is not _phi3:
        raise ConfigInvalid(
            f"partial_rotary_factor is {found['rotary'].share:g}, which is supported for Phi3ForCausalLM only, not for "
            f"{architecture}. Is config.json that of this checkpoint?"
        )
    return whole, found


def _check_activation(architecture: str, fields: Fields) -> None:
    gemma = architecture.startswith("Gemma")
    wanted = _TANH_GELUS if gemma else ("silu",)
    activation = (fields.get("hidden_activation") if gemma else None) or fields.get("hidden_act") or wanted[0]
    if activation not in wanted:
        raise ConfigInvalid(f"The activation {activation} is not supported; {architecture} models use {wanted[0]}.")


def _qwen_windows(fields: Fields) -> tuple[int, ...]:
    """Returns Qwen's windows, which are off unless asked for, and then begin at layer `max_window_layers`."""
    if not fields.get("use_sliding_window", False):
        return ()
    whole = int(fields.get("max_window_layers", _QWEN_FULL_LAYERS))
    layers = range(int(fields["num_hidden_layers"]))
    kinds = fields.get("layer_types") or [_LOCAL if layer >= whole else "full_attention" for layer in layers]
    return _windows({**fields, "layer_types": kinds}, fields.get("sliding_window", _WINDOW_TOKENS))


def _gemma_windows(fields: Fields) -> tuple[int, ...]:
    """Returns Gemma's windows: all layers have one but every so many-th."""
    every = int(fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 1)
    layers = range(int(fields["num_hidden_layers"]))
    kinds = fields.get("layer_types") or ["full_attention" if (layer + 1) % every == 0 else _LOCAL for layer in layers]
    return _windows({**fields, "layer_types": kinds}, fields.get("sliding_window"))


def _windows(fields: Fields, window: Any) -> tuple[int, ...]:  # noqa: ANN401 - a field of the file
    """Returns the window of each layer, 0 for the whole context; empty: no layer has a window."""
    layers = int(fields["num_hidden_layers"])
    kinds = fields.get("layer_types") or [_LOCAL] * layers
    if unknown := sorted({str(kind) for kind in kinds} - {*_LAYER_KINDS}):
        raise ConfigInvalid(
            f"layer_types names {', '.join(unknown)}, which is not supported. Supported: {', '.join(_LAYER_KINDS)}."
        )
    if len(kinds) < layers:
        raise ConfigInvalid(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {layers}.")
    if not window or _LOCAL not in kinds[:layers]:
        return ()
    if int(window) < 1:
        raise ConfigInvalid(f"sliding_window is {window}; it must be at least 1, or null for none.")
    return tuple(int(window) if kind == _LOCAL else 0 for kind in kinds[:layers])
