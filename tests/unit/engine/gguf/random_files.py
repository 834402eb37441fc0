"""Small random models as GGUF files, beside the same models as plain checkpoints.

The weights of a file are random blocks; what they stand for is computed here one number at a time, as the format
defines it, by code that has nothing in common with the engine's.
"""

import json
import math
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
}  # fmt: skip
"""Name of a type -> its number, numbers in a block and bytes of a block."""
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class StoredTensor(NamedTuple):
    """Tensor as it is stored in a file: shape ``[out, in]``, type and bytes."""

    shape: tuple[int, ...]
    type: str
    data: bytes


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], *, version: int = 3
) -> None:
    """Writes a file; integers of the metadata become uint32, lists take the type of their first value."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for name, value in metadata.items():
        head += [_text(name), struct.pack("<I", _kind(value)), _value(value)]
    offset = 0
    for name, tensor in tensors.items():
        head += [_text(name), struct.pack("<I", len(tensor.shape))]
        head += [struct.pack("<Q", side) for side in reversed(tensor.shape)]
        head.append(struct.pack("<IQ", TYPES[tensor.type][0], offset))
        offset += -(-len(tensor.data) // 32) * 32
    data = b"".join(head)
    data += bytes(-len(data) % 32)
    path.write_bytes(data + b"".join(tensor.data + bytes(-len(tensor.data) % 32) for tensor in tensors.values()))


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _kind(value: Any) -> int:
    kinds = {bool: 7, int: 4, float: 6, str: 8, list: 9}
    return kinds[type(value)]


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<?", value)
        case int():
            return struct.pack("<I", value)
        case float():
            return struct.pack("<f", value)
        case str():
            return _text(value)
    return struct.pack("<IQ", _kind(value[0]), len(value)) + b"".join(map(_value, value))


def random_blocks(kind: str, count: int, dice: random.Random, size: float = 0.02) -> bytes:
    """Returns random blocks whose numbers are about as large as weights are."""
    _, numbers, size_bytes = TYPES[kind]
    if numbers == 1:
        values = torch.tensor([dice.gauss(0, 10 * size) for _ in range(count)])
        stored = values.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind])
        return bytes(stored.view(torch.uint8).tolist())
    blocks = []
    shrink = {"Q8_0": 16, "Q4_K": 32, "Q5_K": 64, "Q6_K": 512}.get(kind, 1)
    for _ in range(count):
        block = bytearray(dice.randbytes(size_bytes))
        scale = struct.pack("<e", size / shrink * (0.5 + dice.random()))
        offset = struct.pack("<e", -8 * size * dice.random() if kind.endswith("_1") else size / shrink * 8)
        if kind == "Q6_K":
            block[208:] = scale
        else:
            block[:2] = scale
        if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            block[2:4] = offset
        blocks.append(bytes(block))
    return b"".join(blocks)


def numbers_of(tensor: StoredTensor) -> torch.Tensor:
    """Returns the numbers of a tensor, computed one by one."""
    _, count, size = TYPES[tensor.type]
    if count == 1:
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.type]
        return torch.tensor(list(tensor.data), dtype=torch.uint8).view(kind).float().view(tensor.shape)
    values: list[float] = []
    for at in range(0, len(tensor.data), size):
        block = tensor.data[at : at + size]
        values += [_NUMBER[tensor.type](block, index) for index in range(count)]
    return torch.tensor(values, dtype=torch.float64).float().view(tensor.shape)


def _half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def _nibble(block: bytes, at: int, index: int, span: int) -> int:
    """Number `index` of groups of twice `span` numbers, in whose bytes the second half are the upper nibbles."""
    group, place = divmod(index, 2 * span)
    byte = block[at + group * span + place % span]
    return byte >> 4 if place >= span else byte & 15


def _bit(block: bytes, at: int, index: int) -> int:
    return struct.unpack_from("<I", block, at)[0] >> index & 1


def _six_bits(block: bytes, group: int) -> tuple[int, int]:
    """Scale and offset of a group of 32 numbers in a block of Q4_K or Q5_K."""
    packed = block[4:16]
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    both = packed[group + 4]
    return (both & 15) | (packed[group - 4] >> 6) << 4, (both >> 4) | (packed[group] >> 6) << 4


def _k(block: bytes, index: int, number: int) -> float:
    scale, offset = _six_bits(block, index // 32)
    return _single(_single(_half(block, 0) * scale) * number) - _single(_half(block, 2) * offset)


def _single(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


def _q5_k(block: bytes, index: int) -> float:
    number = _nibble(block, 48, index, 32) | (block[16 + index % 32] >> index // 32 & 1) << 4
    return _k(block, index, number)


def _q6_k(block: bytes, index: int) -> float:
    half, place = divmod(index, 128)
    quarter, column = divmod(place, 32)
    byte = block[64 * half + 32 * (quarter % 2) + column]
    number = (byte >> 4 if quarter > 1 else byte & 15) | (block[128 + 32 * half + column] >> 2 * quarter & 3) << 4
    (scale,) = struct.unpack_from("<b", block, 192 + index // 16)
    return _single(_half(block, 208) * scale) * (number - 32)


_NUMBER: dict[str, Callable[[bytes, int], float]] = {
    "Q4_0": lambda block, index: _half(block, 0) * (_nibble(block, 2, index, 16) - 8),
    "Q4_1": lambda block, index: _single(_half(block, 0) * _nibble(block, 4, index, 16)) + _half(block, 2),
    "Q5_0": lambda block, index: _half(block, 0) * (
        (_nibble(block, 6, index, 16) | _bit(block, 2, index) << 4) - 16
    ),
    "Q5_1": lambda block, index: _half(block, 0) * (_nibble(block, 8, index, 16) | _bit(block, 4, index) << 4)
    + _half(block, 2),
    "Q8_0": lambda block, index: _half(block, 0) * struct.unpack_from("<b", block, 2 + index)[0],
    "Q4_K": lambda block, index: _k(block, index, _nibble(block, 16, index, 32)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}  # fmt: skip


def byte_letters() -> list[str]:
    """Returns GPT-2's letters for the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def vocabulary(**others: Any) -> dict[str, Any]:
    """Returns the metadata of a small byte-level vocabulary."""
    tokens = [*_SPECIAL, *byte_letters(), "he", "ll", "hell", "hello"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **others,
    }


def make_gguf(
    path: Path,
    plain: Path | None = None,
    *,
    kind: str = "Q8_0",
    family: str = "llama",
    tied: bool = False,
    seed: int = 0,
    parts: int = 1,
    kinds: Mapping[str, str] | None = None,
    **others: Any,
) -> None:
    """Writes a random model as a GGUF file, and the same as a checkpoint with weights in fp32.

    Args:
        path: The file.
        plain: Folder for the checkpoint.
        kind: Type of all matrices.
        family: Architecture in the file.
        tied: Whether the head is the table of embeddings.
        seed: Seed of the weights.
        parts: Number of files.
        kinds: Types of some matrices, by a part of their names.
        others: Metadata to add or replace, with underscores for dots of keys of the tokenizer.
    """
    hidden, inner, heads, kv_heads, head_dim, layers = 256, 256, 4, 2, 64, 2
    words = vocabulary()
    vocab = len(words["tokenizer.ggml.tokens"])
    dice = random.Random(seed)
    stored: dict[str, StoredTensor] = {}
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, theirs: str, *shape: int, pairs: int = 0) -> None:
        own = next((other for part, other in (kinds or {}).items() if part in name), kind)
        own = own if len(shape) == 2 else "F32"
        count = math.prod(shape) // TYPES[own][1]
        data = random_blocks(own, count, dice)
        tensor = StoredTensor(shape, own, data)
        numbers = numbers_of(tensor)
        if "norm" in name:
            numbers = numbers + 1
            tensor = StoredTensor(shape, own, bytes(numbers.view(torch.uint8).tolist()))
        stored[name] = tensor
        if pairs and family == "llama":
            width = shape[0] // pairs
            order = [
                head * width + (2 * row if row < width // 2 else 2 * (row - width // 2) + 1)
                for head in range(pairs)
                for row in range(width)
            ]
            numbers = numbers[order]
        weights[theirs] = numbers

    add("token_embd.weight", "model.embed_tokens.weight", vocab, hidden)
    add("output_norm.weight", "model.norm.weight", hidden)
    if not tied:
        add("output.weight", "lm_head.weight", vocab, hidden)
    for layer in range(layers):
        own, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        add(f"{own}attn_norm.weight", f"{theirs}input_layernorm.weight", hidden)
        add(f"{own}ffn_norm.weight", f"{theirs}post_attention_layernorm.weight", hidden)
        for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            pairs = 0 if letter == "v" else count
            name, other = f"{own}attn_{letter}", f"{theirs}self_attn.{letter}_proj"
            add(f"{name}.weight", f"{other}.weight", count * head_dim, hidden, pairs=pairs)
            if family == "qwen2":
                add(f"{name}.bias", f"{other}.bias", count * head_dim, pairs=pairs)
            if family == "qwen3" and pairs:
                add(f"{name}_norm.weight", f"{theirs}self_attn.{letter}_norm.weight", head_dim)
        add(f"{own}attn_output.weight", f"{theirs}self_attn.o_proj.weight", hidden, heads * head_dim)
        for part in ("gate", "up"):
            add(f"{own}ffn_{part}.weight", f"{theirs}mlp.{part}_proj.weight", inner, hidden)
        add(f"{own}ffn_down.weight", f"{theirs}mlp.down_proj.weight", hidden, inner)
    metadata = {
        "general.architecture": family,
        f"{family}.block_count": layers,
        f"{family}.context_length": 512,
        f"{family}.embedding_length": hidden,
        f"{family}.feed_forward_length": inner,
        f"{family}.attention.head_count": heads,
        f"{family}.attention.head_count_kv": kv_heads,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": 10000.0,
        **words,
        **others,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if parts == 1:
        write_gguf(path, metadata, stored)
    for part in range(parts if parts > 1 else 0):
        some = dict(list(stored.items())[part::parts])
        split = {"split.no": part, "split.count": parts}
        place = path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf")
        write_gguf(place, {**metadata, **split} if part == 0 else split, some)
    if plain is not None:
        _save(plain, family, weights, tied, vocab, (hidden, inner, heads, kv_heads, layers))


def _save(
    folder: Path, family: str, weights: dict[str, torch.Tensor], tied: bool, vocab: int, shape: tuple[int, ...]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, heads, kv_heads, layers = shape
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
