"""fp32 products in the tiles of the quantised ones, for processors on which MKL's are not to be had.

A row is computed by itself to the last bit, on every processor. Figures: ``docs/design/0021-bake-off.md``.
"""

from typing import ClassVar

from torch import Tensor

from maitred.engine.kernels.linear.quantised import QuantisedLinear
from maitred.engine.kernels.linear.tiles import PANEL
from maitred.engine.kernels.tape import Tape


class TiledLinear(QuantisedLinear):
    """``rows @ weight.T + bias`` with a weight that is laid out in panels, and not rounded.

    Implements `maitred.engine.kernels.linear.form.Stripped`: a strip is a panel.

    Args:
        weight: fp32 ``[out, in]`` on the CPU.
        bias: ``[out]``
    """

    __slots__ = ()
    kind: ClassVar[str] = "tiled"
    strip: ClassVar[int] = PANEL

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias, bits=32, real=True)

    @property
    def shape(self) -> tuple[int, int]:
        """See `Stripped`."""
        return self._shape

    @property
    def part(self) -> int:
        """See `Stripped`: there is one."""
        return self._shape[0]

    def record_strips(self, tape: Tape, rows: int, out: int, counter: int, marks: int) -> None:
        """See `Stripped`."""
        tape.add(self._product, self._job(tape.threads, rows=rows, out=out, marks=marks), counter, 0)
