"""fp32 products in the tiles of the quantised ones, for processors on which MKL's are not to be had.

A row is computed by itself to the last bit, on every processor. Figures: ``docs/design/0021-bake-off.md``.
"""

from typing import ClassVar

from torch import Tensor

from maitred.engine.kernels.linear.quantised import QuantisedLinear


class TiledLinear(QuantisedLinear):
    """``rows @ weight.T + bias`` with a weight that is laid out in panels, and not rounded.

    Args:
        weight: fp32 ``[out, in]`` on the CPU.
        bias: ``[out]``
    """

    __slots__ = ()
    kind: ClassVar[str] = "tiled"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias, bits=32, real=True)
