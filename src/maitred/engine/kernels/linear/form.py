"""Protocols of a matrix product with a fixed weight, and its two plainest implementations."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.tape import Tape


class Linear(Protocol):
    """Matrix product ``rows @ weight.T + bias`` with a weight that never changes.

    A linear can be taken apart into plain tensors and made again from them, so a weight that was packed once can be
    stored in a file and mapped.
    """

    kind: ClassVar[str]
    """Name of the form in which the weight is stored; see `maitred.engine.kernels.linear.KINDS`."""
    alignment: ClassVar[int]
    """Alignment in bytes. `from_tensors` uses tensors at such addresses as they are, and copies all others."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps ``[T, in]`` to ``[T, out]``."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors of the product, contiguous and not copied; they may be large and mostly zero pages."""
        ...

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Makes a product from the result of `to_tensors` on the same processor; the tensors are never written."""
        ...


@runtime_checkable
class TapedLinear(Linear, Protocol):
    """Linear that can be recorded on a tape, to be computed without the interpreter."""

    def scratch_bytes(self, rows: int) -> int:
        """Returns the scratch memory for so many rows; it is used exclusively, and nothing is kept in it."""
        ...

    def record(self, tape: Tape, rows: int, out: int, counter: int, scratch: int, most_rows: int) -> None:
        """Records the calls of the product on a tape.

        Args:
            tape: Tape that is played no longer than this product lives.
            rows: Address of fp32 ``[max_rows, in]``.
            out: Address of fp32 ``[max_rows, out]``.
            counter: Address of an int64: the number of rows when the tape is played.
            scratch: Address of scratch memory of `scratch_bytes(max_rows)`.
            most_rows: Maximum number of rows.
        """
        ...


class StripLinear(TapedLinear, Protocol):
    """Linear that can compute single strips of outputs, with the same bits as in the whole product.

    The outputs are divided into parts, and each part into strips. The last part, and the last strip of a part, may be
    shorter.
    """

    @property
    def strip(self) -> int:
        """Number of outputs in a strip."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        ...

    @property
    def part(self) -> int:
        """Number of outputs in a part."""
        ...

    def record_strips(self, tape: Tape, rows: int, out: int, counter: int, marks: int) -> None:
        """Records the product for the strips and rows that are marked by bytes ``[strips, rows]`` at `marks`."""
        ...


class PlainLinear:
    """Product that torch computes.

    Args:
        weight: ``[out, in]``
        bias: ``[out]``
    """

    __slots__ = ("_bias", "_weight")
    kind: ClassVar[str] = "plain"
    alignment: ClassVar[int] = 64

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps ``[T, in]`` to ``[T, out]``."""
        return functional.linear(rows, self._weight, self._bias)

    def tensors(self) -> dict[str, Tensor]:
        """Returns weight and bias; implements `Linear.tensors`."""
        return {"weight": self._weight} | ({} if self._bias is None else {"bias": self._bias})

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Makes the product from weight and bias; implements `Linear.of`."""
        return cls(tensors["weight"], tensors.get("bias"))


class Unchanged:
    """Linear that returns its rows unchanged: the head of a model without a head."""

    __slots__ = ()
    kind: ClassVar[str] = "unchanged"
    alignment: ClassVar[int] = 1

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the rows as they are."""
        return rows

    def tensors(self) -> dict[str, Tensor]:
        """Returns no tensors; implements `Linear.tensors`."""
        return {}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Makes the linear; implements `Linear.of`."""
        return cls()
