"""Tensors of a GGUF file under the names and in the order of rows of Hugging Face's checkpoint of the same model."""

import re
from collections.abc import KeysView, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maitred.engine.gguf.blocks import dequantise, grouped_weight
from maitred.engine.gguf.file import GGUFHeader, TensorEntry, gguf_parts
from maitred.engine.kernels.linear.panels import GroupedWeight

_ROTARY_IN_PAIRS = frozenset(("llama", "smollm3"))
"""Architectures whose files have the two numbers that are rotated together side by side in each head."""
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_PARTS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PARTS_OF = {
    "gemma2": _GEMMA_PARTS,
    "gemma3": _GEMMA_PARTS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""Architecture -> its parts that have other names."""
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rotary_emb.inv_freq",
}


class GGUFTensors:
    """Open GGUF file; `get_tensor` is that of an open safetensors file.

    Args:
        path: The file, or one of those into which a model is split.

    Raises:
        ConfigInvalid: The file is broken, or a part is missing.
    """

    def __init__(self, path: Path) -> None:
        header = GGUFHeader.read(path)
        first = gguf_parts(path)[0]
        metadata = header.metadata if first == path else GGUFHeader.read(first).metadata
        family = str(metadata.get("general.architecture"))
        self._entries = {checkpoint_name(name, family): entry for name, entry in header.tensors.items()}
        self._heads = _heads_in_pairs(metadata)
        # Mapped shared, so that pages of the file that were read are the system's to drop.
        self._data = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)

    @property
    def names(self) -> KeysView[str]:
        """Names of the tensors."""
        return self._entries.keys()

    def get_tensor(self, name: str) -> Tensor:
        """Returns the numbers of a tensor, in fp16 or bf16 if they are stored so, and else in fp32."""
        entry = self._entries[name]
        return self._put_in_order(name, dequantise(self._bytes(entry), entry.format).view(entry.shape))

    def get_grouped(self, name: str) -> GroupedWeight | None:
        """Returns a weight with its numbers of 4 or 8 bits as they are stored; None: it has others."""
        entry = self._entries[name]
        weight = grouped_weight(self._bytes(entry), entry.format, *entry.shape)
        if weight is None:
            return None
        parts = (weight.numbers, weight.scales, weight.offsets, weight.factors)
        numbers, scales, *others = (None if part is None else self._put_in_order(name, part) for part in parts)
        assert numbers is not None
        assert scales is not None
        return GroupedWeight(weight.bits, numbers, scales, *others)

    def _bytes(self, entry: TensorEntry) -> Tensor:
        # Copied, since numbers of an fp32 tensor may begin at any multiple of the file's alignment.
        return self._data[entry.offset : entry.offset + entry.bytes].clone()

    def _put_in_order(self, name: str, rows: Tensor) -> Tensor:
        projection = name.rpartition(".")[0].rpartition(".")[2]
        return apart(rows, self._heads[projection]) if projection in self._heads else rows


def checkpoint_name(name: str, family: str = "llama") -> str:
    """Returns the name in a checkpoint of a tensor of a GGUF file; an unknown name stays."""
    match, parts = _BLOCK.fullmatch(name), _PARTS | _PARTS_OF.get(family, {})
    if match is None or match["part"] not in parts:
        return _NAMES.get(name, name)
    return f"model.layers.{match['layer']}.{parts[match['part']]}.{match['kind']}"


def apart(rows: Tensor, heads: int) -> Tensor:
    """Orders the rows of queries or keys so that pair ``i`` of a head is its rows ``i`` and ``i + head_dim / 2``."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _heads_in_pairs(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns the projections whose heads have their rotated numbers side by side, with the number of heads."""
    family = metadata.get("general.architecture")
    if family not in _ROTARY_IN_PAIRS:
        return {}
    heads = metadata[f"{family}.attention.head_count"]
    kv_heads = metadata.get(f"{family}.attention.head_count_kv", heads)
    counts = [count[0] if isinstance(count, list) else count for count in (heads, kv_heads)]
    return dict(zip(("q_proj", "k_proj"), map(int, counts), strict=True))
