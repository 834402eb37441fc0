"""Numbers of GGUF tensors from their blocks, exactly as the format defines them.

A block has a few scales for its numbers (ggml's ``ggml-quants.c`` and the GGUF specification define the layouts). All
products and sums here are of fp16 scales and small integers, so fp32 has room for them: the numbers are those that
llama.cpp computes with. Weights of 4 bits with one scale and one offset for 32 may also stay as they are
(`grouped_weight`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from maitred.engine.gguf.file import KEPT_FORMATS, BlockFormat
from maitred.engine.kernels.linear.panels import GroupedWeight

_PIECE_BLOCKS = 1 << 16
"""Blocks that are converted at a time, so that a large tensor needs little memory beside its result."""


def dequantise(data: Tensor, form: BlockFormat) -> Tensor:
    """Returns the numbers of a tensor: in fp16 or bf16 where they are stored so, else in fp32.

    Args:
        data: Bytes of the tensor, uint8 ``[...]``, one-dimensional.
        form: Form of its blocks.
    """
    match form.name:
        case "F32":
            return data.view(torch.float32)
        case "F16":
            return data.view(torch.float16)
        case "BF16":
            return data.view(torch.bfloat16)
    numbers = _NUMBERS[form.name]
    blocks = data.view(-1, form.bytes)
    out = torch.empty(len(blocks), form.numbers)
    for first in range(0, len(blocks), _PIECE_BLOCKS):
        piece = blocks[first : first + _PIECE_BLOCKS]
        out[first : first + len(piece)] = numbers(piece)
    return out.view(-1)


def grouped_weight(data: Tensor, form: BlockFormat, *shape: int) -> GroupedWeight | None:
    """Returns a weight ``[out, in]`` with its numbers of 4 bits as they are stored; None: it has others.

    Args:
        data: Bytes of the tensor, uint8, one-dimensional.
        form: Form of its blocks.
        shape: Its shape.
    """
    if form.name not in KEPT_FORMATS:
        return None
    blocks = data.view(-1, form.bytes)
    scale = blocks[:, :2].contiguous().view(torch.float16)
    offset = 8 * scale if form.name == "Q4_0" else -blocks[:, 2:4].contiguous().view(torch.float16)
    if not offset.isfinite().all():
        return None  # eight times a scale may be too large for fp16
    outputs, groups = shape[0], shape[1] // form.numbers
    numbers = _nibbles(blocks[:, -16:]).view(shape)
    return GroupedWeight(numbers, scale.view(outputs, groups), offset.view(outputs, groups))


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Returns the fp16 number at a byte of each block, as fp32 ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """Returns the lower halves of all bytes, then the upper ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Returns bit ``i`` of 32 for number ``i``, as 16."""
    bits = data[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).view(len(data), 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]) + _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _scales_and_offsets(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks 8 scales and 8 offsets of 6 bits from 12 bytes.

    Of the first four, the bits stand together; of the others, the lower four stand together and the upper two above the
    first four.
    """
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    offsets = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    return scales, offsets


def _scaled_groups(blocks: Tensor, numbers: Tensor) -> Tensor:
    """Scales 8 groups of 32 numbers by the scales at the beginning of each block of Q4_K or Q5_K."""
    scales, offsets = _scales_and_offsets(blocks[:, 4:16])
    scale, offset = _halves(blocks, 0) * scales, _halves(blocks, 2) * offsets
    return (scale[:, :, None] * numbers - offset[:, :, None]).view(len(blocks), 256)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_groups(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = blocks[:, 16:48, None] >> torch.arange(8, dtype=torch.uint8)
    lower = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _scaled_groups(blocks, lower | (fifth & 1).transpose(1, 2) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    lower = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    numbers = (lower | (pairs & 3) << 4).float() - 32
    scales = blocks[:, 192:208].view(torch.int8).float() * _halves(blocks, 208)
    return (numbers.view(-1, 16, 16) * scales[:, :, None]).view(-1, 256)


_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Name of a format -> function from blocks, uint8 ``[blocks, bytes]``, to their numbers, fp32 ``[blocks, numbers]``."""
