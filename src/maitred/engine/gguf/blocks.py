"""Numbers of GGUF tensors from their blocks, exactly as the format defines them.

A block has a few scales for its numbers (ggml's ``ggml-quants.c`` and the GGUF specification define the layouts). All
products and sums here are of fp16 scales and small integers, so fp32 has room for them: the numbers are those that
llama.cpp computes with. Weights may also stay as they are stored (`grouped_weight`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from maitred.engine.gguf.file import BlockFormat
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
    """Returns a weight ``[out, in]`` with its numbers as they are stored; None: they have other forms than those kept.

    Numbers of 5 and 6 bits take 8.

    Args:
        data: Bytes of the tensor, uint8, one-dimensional.
        form: Form of its blocks.
        shape: Its shape.
    """
    parts = _KEPT.get(form.name)
    if parts is None:
        return None
    bits, numbers, scales, offsets, factors = parts(data.view(-1, form.bytes))
    if offsets is not None and not offsets.isfinite().all():
        return None  # eight times a scale may be too large for fp16
    outputs = shape[0]
    return GroupedWeight(
        bits,
        numbers.view(shape),
        scales.reshape(outputs, -1),
        offsets=None if offsets is None else offsets.reshape(outputs, -1),
        factors=None if factors is None else factors.reshape(outputs, shape[1] // form.numbers, -1),
    )


def _stored_halves(blocks: Tensor, at: int) -> Tensor:
    """Returns the fp16 number at a byte of each block, ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Returns the fp16 number at a byte of each block, as fp32 ``[blocks, 1]``."""
    return _stored_halves(blocks, at).float()


def _nibbles(data: Tensor) -> Tensor:
    """Returns the lower halves of all bytes, then the upper ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _five_bits(blocks: Tensor, at: int) -> Tensor:
    """Returns 32 numbers of 5 bits: their fifth bits stand at a byte of each block, the others behind them."""
    bits = blocks[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return _nibbles(blocks[:, at + 4 :]) | (bits & 1).view(len(blocks), 32) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]) + _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_five_bits(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _five_bits(blocks, 4) + _halves(blocks, 2)


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


def _numbers_of_q4_k(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)


def _numbers_of_q5_k(blocks: Tensor) -> Tensor:
    fifth = blocks[:, 16:48, None] >> torch.arange(8, dtype=torch.uint8)
    lower = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return lower | (fifth & 1).transpose(1, 2) << 4


def _numbers_of_q6_k(blocks: Tensor) -> Tensor:
    lower = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (lower | (pairs & 3) << 4).view(-1, 16, 16)


def _q6_k(blocks: Tensor) -> Tensor:
    numbers = _numbers_of_q6_k(blocks).float() - 32
    scales = blocks[:, 192:208].view(torch.int8).float() * _halves(blocks, 208)
    return (numbers * scales[:, :, None]).view(-1, 256)


_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": lambda blocks: _scaled_groups(blocks, _numbers_of_q4_k(blocks)),
    "Q5_K": lambda blocks: _scaled_groups(blocks, _numbers_of_q5_k(blocks)),
    "Q6_K": _q6_k,
}
"""Name of a format -> function from blocks, uint8 ``[blocks, bytes]``, to their numbers, fp32 ``[blocks, numbers]``."""

_Parts = tuple[int, Tensor, Tensor, Tensor | None, Tensor | None]
"""Bits, numbers, scales, offsets and factors of blocks; see `GroupedWeight`, whose numbers of 8 bits have 128 for 0."""


def _with_offsets(bits: int, blocks: Tensor, numbers: Tensor) -> _Parts:
    return bits, numbers, _stored_halves(blocks, 0), -_stored_halves(blocks, 2), None


def _with_factors(bits: int, blocks: Tensor, numbers: Tensor) -> _Parts:
    return bits, numbers, *_scales_and_offsets(blocks[:, 4:16]), blocks[:, :4].contiguous().view(torch.float16)


_KEPT: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": lambda blocks: (4, _nibbles(blocks[:, 2:]), _stored_halves(blocks, 0), 8 * _stored_halves(blocks, 0), None),
    "Q4_1": lambda blocks: _with_offsets(4, blocks, _nibbles(blocks[:, 4:])),
    "Q5_0": lambda blocks: (8, _five_bits(blocks, 2) + 112, _stored_halves(blocks, 0), None, None),
    "Q5_1": lambda blocks: _with_offsets(8, blocks, _five_bits(blocks, 4) + 128),
    "Q8_0": lambda blocks: (8, blocks[:, 2:] + 128, _stored_halves(blocks, 0), None, None),
    "Q4_K": lambda blocks: _with_factors(4, blocks, _numbers_of_q4_k(blocks)),
    "Q5_K": lambda blocks: _with_factors(8, blocks, _numbers_of_q5_k(blocks) + 128),
    "Q6_K": lambda blocks: (
        *(8, _numbers_of_q6_k(blocks) + 96, blocks[:, 192:208].contiguous().view(torch.int8), None),
        _stored_halves(blocks, 208),
    ),
}
"""Name of a format -> function from blocks, uint8 ``[blocks, bytes]``, to their parts as they are stored."""
