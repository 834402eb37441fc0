"""Matrix products with fixed weights.

On a CPU, torch's own product repacks an fp32 weight in every call, which costs more than the product itself for the
few rows of a decode step. MKL can keep the packed form instead (``cblas_sgemm_pack`` and ``cblas_sgemm_compute``).
Packed once for many rows, it serves any number of them: up to twice as fast, and a row's result is the same to the
last bit whatever rows are computed beside it. Figures: ``docs/design/0002-cpu-kernels.md``.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_PACKED_FOR_ROWS = 512
"""MKL chooses the layout by this row count. Layouts for few rows are slow with many; the reverse costs nothing."""


class Linear(Protocol):
    """``rows @ weight.T + bias`` with a weight that never changes."""

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``."""
        ...


class PlainLinear:
    """Torch's own product.

    Args:
        weight: ``[out, in]``
        bias: ``[out]``
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``."""
        return functional.linear(rows, self._weight, self._bias)


class PackedLinear:
    """MKL's product with a weight in MKL's own layout; it keeps no other copy of the weight.

    Args:
        weight: fp32 ``[out, in]`` on the CPU.
        bias: ``[out]``
    """

    __slots__ = ("_bias", "_packed", "_shape")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
        # The operator takes the plain weight too, but reads only its shape: one element, repeated, will do.
        self._shape = torch.empty(1).expand(weight.shape)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``."""
        count = len(rows)
        if not count:
            return rows.new_empty(0, len(self._shape))
        # Told that the weight was packed for exactly this many rows, the operator never falls back to the plain weight.
        product: Tensor = torch.ops.mkl._mkl_linear(rows, self._packed, self._shape, self._bias, count)
        return product


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest product for this weight, its type and its device."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        packed = PackedLinear(weight, bias)
        if _agrees(packed, PlainLinear(weight, bias), weight.shape[1]):
            return packed
    return PlainLinear(weight, bias)


def _agrees(packed: Linear, plain: Linear, features: int) -> bool:
    """Whether both give the same result.

    MKL promises a packed weight only for the row count that it was packed for. That one layout serves all counts is
    what it does, not what it says, so each weight is tried before it is relied on.
    """
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, 33):
        rows = torch.randn(count, features, generator=generator)
        if not torch.allclose(packed(rows), plain(rows), atol=1e-3, rtol=1e-3):
            return False
    return True
