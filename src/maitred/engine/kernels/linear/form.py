"""What a matrix product with a fixed weight is to the rest of the engine, and its two plainest forms."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.tape import Tape


class Linear(Protocol):
    """``rows @ weight.T + bias`` with a weight that never changes.

    It can be taken apart into plain tensors and put together again, so that what was packed once can be kept in a file
    and mapped.
    """

    kind: ClassVar[str]
    """The form that the weight is kept in; see `maitred.engine.kernels.linear.KINDS`."""
    alignment: ClassVar[int]
    """`of` takes tensors whose addresses are multiples of it as they are, and copies all others. Bytes."""

    def __call__(self, rows: Tensor) -> Tensor:
        """``[T, in]`` -> ``[T, out]``."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All that it consists of, contiguous; nothing is copied. They may be large and mostly zero pages."""
        ...

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The same again from what `tensors` gave on the same processor; only read, never written."""
        ...


@runtime_checkable
class TapedLinear(Linear, Protocol):
    """One that can be written onto a tape, to be computed without the interpreter."""

    def scratch_bytes(self, rows: int) -> int:
        """Memory that so many rows need on the way. Nobody else uses it meanwhile, and nothing has to stay in it."""
        ...

    def record(self, tape: Tape, rows: int, out: int, counter: int, room: int, most_rows: int) -> None:
        """Adds its calls to a tape.

        Args:
            tape: To be played as long as this product lives.
            rows: Address of fp32 ``[most_rows, in]``.
            out: Address of fp32 ``[most_rows, out]``.
            counter: Address of an int64: how many rows there are when the tape is played.
            room: Address of `room_bytes` for that many rows.
            most_rows: Most that there can be.
        """
        ...


class StripLinear(TapedLinear, Protocol):
    """One of which single strips of outputs can be computed, with the same bits as among all of them.

    Outputs are in parts, the last of which may be shorter, and each part is in strips, the last of which may be.
    """

    @property
    def strip(self) -> int:
        """Outputs of a strip."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        ...

    @property
    def part(self) -> int:
        """Outputs of a part."""
        ...

    def record_strips(self, tape: Tape, rows: int, out: int, counter: int, marks: int) -> None:
        """As `record`, for the strips and rows that bytes ``[strips, rows]`` at an address mark."""
        ...


class PlainLinear:
    """Torch's own product.

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
        """``[T, in]`` -> ``[T, out]``."""
        return functional.linear(rows, self._weight, self._bias)

    def tensors(self) -> dict[str, Tensor]:
        """See `Linear`."""
        return {"weight": self._weight} | ({} if self._bias is None else {"bias": self._bias})

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """See `Linear`."""
        return cls(tensors["weight"], tensors.get("bias"))


class Unchanged:
    """No product at all: what stands for the head of a model that has none."""

    __slots__ = ()
    kind: ClassVar[str] = "unchanged"
    alignment: ClassVar[int] = 1

    def __call__(self, rows: Tensor) -> Tensor:
        """The rows as they are."""
        return rows

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """See `Linear`."""
        return cls()
