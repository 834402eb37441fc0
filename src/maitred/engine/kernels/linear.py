"""Matrix products with fixed weights."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """``rows @ weight.T + bias`` with a weight that never changes."""

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``."""
        ...


class PlainLinear:
    """Torch's own product."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``."""
        return functional.linear(rows, self._weight, self._bias)


def make_linear(weight: Tensor, bias: Tensor | None = None, *, keep: bool = False) -> Linear:
    """The fastest product for this weight on its device.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]``.
        keep: The caller goes on using `weight` itself.
    """
    return PlainLinear(weight, bias)
