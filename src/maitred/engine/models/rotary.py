"""Rotary embedding: tables of the angles by which positions rotate query and key vectors."""

import math

import torch
from torch import Tensor

from maitred.engine.models.config import ModelConfig
from maitred.engine.models.rotary_config import RotaryConfig


class RotaryTables:
    """Tables of a model's layers: one for each rotary embedding that occurs.

    A table is fp32 ``[context_tokens, head_dim]``, cosines in the first half and sines in the second. Pair ``i`` of a
    head is its elements ``i`` and ``i + head_dim / 2``. Pairs that are not rotated have the angle 0, so the kernels
    know of none: `weights` puts the rows of partly rotated heads in this order (`pair_order`).

    Args:
        config: Shape of the model.
        device: Device of the tables.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        kinds = [config.rotary_of(layer) for layer in range(config.layers)]
        distinct = list(dict.fromkeys(kinds))
        self.tables = [_table(rotary, config, device) for rotary in distinct]
        self._table_of = [distinct.index(kind) for kind in kinds]

    def of(self, layer: int) -> Tensor:
        """Returns the table of a layer."""
        return self.tables[self._table_of[layer]]

    def angles(self, positions: Tensor) -> list[Tensor]:
        """Returns the rows of each table at these positions, ``[T, head_dim]``."""
        return [table[positions] for table in self.tables]

    def angles_of(self, layer: int, angles: list[Tensor]) -> Tensor:
        """Returns a layer's rows among those that `angles` returned."""
        return angles[self._table_of[layer]]


def pair_order(config: ModelConfig) -> Tensor | None:
    """Returns the order of a stored head's numbers in which pair ``i`` is ``i`` and ``i + head_dim / 2``.

    The numbers of queries and keys are put in the same order, so their products are the same. None: the stored order
    is this one, because whole heads are rotated.
    """
    rotated, head_dim = config.rotary.rotated_numbers(config.head_dim), config.head_dim
    if rotated == head_dim:
        return None
    numbers = torch.arange(head_dim)
    turned, rest = numbers[:rotated].view(2, -1), numbers[rotated:].view(2, -1)
    return torch.cat((turned, rest), dim=1).flatten()


def _table(rotary: RotaryConfig | None, config: ModelConfig, device: torch.device | str) -> Tensor:
    table = torch.zeros(config.context_tokens, config.head_dim, device=device)
    half = config.head_dim // 2
    table[:, :half] = 1.0
    if rotary is not None:
        positions = torch.arange(config.context_tokens, dtype=torch.float32, device=device)
        frequencies = _frequencies(rotary, config).to(device)
        angles = positions[:, None] * frequencies[None, :]
        table[:, : len(frequencies)] = angles.cos() * rotary.amplitude
        table[:, half : half + len(frequencies)] = angles.sin() * rotary.amplitude
    return table


def _frequencies(rotary: RotaryConfig, config: ModelConfig) -> Tensor:
    """Returns the radians per token of each rotated pair, fp32."""
    dim = rotary.rotated_numbers(config.head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / rotary.theta**exponents
    if rotary.scaling == "linear":
        return frequencies / rotary.factor
    if rotary.scaling == "llama3":
        low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
        turns = rotary.original_context_tokens * frequencies / (2 * math.pi)
        # 1 where a pair turns often within the original context (left alone), 0 where it hardly turns (stretched).
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rotary.factor)
    if rotary.scaling == "yarn":
        kept = 1.0 - _yarn_ramp(rotary, dim)
        return frequencies * (kept + (1.0 - kept) / rotary.factor)
    if rotary.scaling == "longrope":
        # One set for all positions: keys in the cache could not be turned again when a text grows beyond the original
        # context. So the set is that of the longest text.
        is_long = config.context_tokens > rotary.original_context_tokens
        return frequencies / torch.tensor(rotary.long_factors if is_long else rotary.short_factors)
    return frequencies


def _yarn_ramp(rotary: RotaryConfig, dim: int) -> Tensor:
    """Returns how far each pair is stretched: 0 for those that turn often, 1 for those that hardly turn."""

    def pair_with(turns: float) -> float:
        """Returns the pair, a fraction, that turns so often within the original context."""
        return dim * math.log(rotary.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    first, last = pair_with(rotary.fast_turns), pair_with(rotary.slow_turns)
    if rotary.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    return ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotates ``heads`` ``[T, n, head_dim]`` by the rows ``[T, head_dim]`` of a rotary table, in fp32."""
    half = heads.shape[-1] // 2
    cosines, sines = table[:, None, :half], table[:, None, half:]
    first, second = heads[..., :half].float(), heads[..., half:].float()
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)
