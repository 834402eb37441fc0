"""llama.cpp's own server on a model in the format of safetensors: runs in the environment of that server.

    python external_llamacpp.py MODEL_FOLDER PORT

The model is written as GGUF first. Its attention weights change their order on the way: llama.cpp turns neighbouring
numbers of a head together where the original turns its two halves (RoPE), so rows of the two halves take turns there.
The names of fields and tensors are those of the `gguf` package; the regular expression of the bundled model's
tokenizer is the one that llama.cpp knows as ``qwen2``.
"""

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from numpy.typing import NDArray

PLACES = 8
"""Requests at once."""
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2"}
_WIDTHS = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}

Floats = NDArray[np.float32]


def convert(folder: Path, target: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> None:
    """Writes a Llama or a Qwen2 with a byte-level BPE tokenizer as GGUF, its matrices in the numbers of that kind."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, _ARCHITECTURES[config["model_type"]])
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder, config)
    # Qwen2 turns the halves together in llama.cpp, too.
    turned = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads} if config["model_type"] == "llama" else {}
    for name, weights in _tensors(folder / "model.safetensors"):
        stem, ending = name.rsplit(".", 1)
        place, _, number_and_part = stem.partition("layers.")
        number, _, part = number_and_part.partition(".")
        own = _take_turns(weights, turned[part]) if part in turned else weights
        wanted = kind if own.ndim == 2 else gguf.GGMLQuantizationType.F32
        called = f"blk.{number}.{_NAMES[part]}" if part else _NAMES[place]
        writer.add_tensor(f"{called}.{ending}", gguf.quants.quantize(own, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    tokens = {number: token for token, number in ids.items()}
    order = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens.get(number, f"<|unused {number}|>") for number in order])
    kinds = gguf.TokenType
    writer.add_token_types(
        [kinds.CONTROL if n in special else kinds.NORMAL if n in tokens else kinds.UNUSED for n in order]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if "pad_token_id" in config:
        writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(settings["chat_template"])


def _tensors(path: Path) -> list[tuple[str, Floats]]:
    """All tensors of a file: eight bytes of length, a JSON head of that length, and the numbers."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = []
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        raw = np.frombuffer(data[begin + first : begin + end], _WIDTHS[entry["dtype"]])
        if entry["dtype"] == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        found.append((name, raw.astype(np.float32).reshape(entry["shape"])))
    return found


def _take_turns(weights: Floats, heads: int) -> Floats:
    """The rows of each head's two halves take turns: 0, n/2, 1, n/2 + 1 and so on."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def main(folder: Path, port: int) -> None:
    """Serves until it is ended."""
    with tempfile.TemporaryDirectory(prefix="maitred-gguf-") as place:
        model = Path(place) / f"{folder.name}.gguf"
        convert(folder, model)
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.model_alias = {folder.name}
        params.hostnames = ["127.0.0.1"]
        params.port = port
        params.n_ctx = 1024 * PLACES
        params.n_parallel = PLACES
        params.cpuparams.n_threads = 2
        params.endpoint_metrics = True
        params.fit_params = False
        params.warmup = False
        server = xllamacpp.Server(params)
        print(f"listening at {server.listening_address}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
