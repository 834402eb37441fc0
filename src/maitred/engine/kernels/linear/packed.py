"""Linear for fp32 on a CPU with a weight in MKL's packed layout.

Torch's own product repacks an fp32 weight in every call, which costs more than the product itself for the few rows of
a decode step. MKL can keep the packed form instead (``cblas_sgemm_pack`` and ``cblas_sgemm_compute``, in the manual
under "BLAS-like Extensions"). A weight packed once for many rows serves any number of rows. It is up to twice as fast,
and a row's result is the same to the last bit whatever rows are computed beside it. Few rows are computed even faster,
with the same bits, by our own code that reads the packed form (`strips`). Figures: ``docs/design/0002-cpu-kernels.md``.

Torch wraps these two functions, but hides the packed weight in a tensor without storage. So they are called directly,
as C functions of the library that torch has loaded. Then the packed weight is plain memory, which can be written to a
file and mapped.
"""

# ruff: noqa: ANN401 - values of the code generator and functions of a library have no types of their own

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from maitred.engine.kernels.job import COUNT, NEXT, CompiledEntry, enter_together, floats, torch_library
from maitred.engine.kernels.linear.form import Linear, PlainLinear
from maitred.engine.kernels.linear.strips import (
    ALL,
    BIAS,
    COMPUTE,
    EDITION,
    ENTRY,
    FIELDS,
    INPUTS,
    MOST_ROWS,
    OUT,
    OUTPUTS,
    PACKED,
    ROWS,
    STRIP,
    THREADS,
    TOGETHER,
    WEIGHTS_WORTH_A_THREAD,
    Layout,
    find_layout,
    strips_at_a_time,
    strips_product,
)
from maitred.engine.kernels.tape import ALONE, Tape, call, enter

_LAYOUT_ROWS = 512
"""Row count that MKL chooses the layout for. Layouts for few rows are slow with many; the reverse costs nothing."""
_WORTH_SHARING_OUTPUTS = 256
_ROW_MAJOR, _AS_IS, _TRANSPOSED, _PACKED, _SECOND_MATRIX = 101, 111, 112, 151, 162
"""Constants of MKL (``mkl_cblas.h``)."""
_TRIED_ROWS = (1, 2, 3, 4, 5, 8, 31, 33, MOST_ROWS, 70)
_APART: dict[tuple[int, int, int, bool], bool] = {}
"""Outputs, inputs, threads, and whether strips are read -> whether rows are computed independently of each other."""
_PLACE_BYTES = 1 << 21
"""Alignment of packed memory. The position of MKL's weight within it depends on the address modulo this size."""


class PackedLinear:
    """Linear that MKL computes with a weight in MKL's own layout; it keeps no other copy of the weight.

    Args:
        weight: fp32 ``[out, in]`` on the CPU.
        bias: ``[out]``
    """

    __slots__ = ("_address", "_bias", "_layout", "_packed", "_shape")
    kind: ClassVar[str] = "packed"
    alignment: ClassVar[int] = _PLACE_BYTES
    strip = STRIP

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        outputs, inputs = weight.shape
        weight = weight.contiguous()
        mkl = _mkl()
        rows = _layout_rows(outputs)
        packed = _place(mkl.cblas_sgemm_pack_get_size(_SECOND_MATRIX, rows, outputs, inputs) // 4)
        mkl.cblas_sgemm_pack(
            *(_ROW_MAJOR, _SECOND_MATRIX, _TRANSPOSED, rows, outputs, inputs),
            *(1.0, weight.data_ptr(), inputs, packed.data_ptr()),
        )
        self._hold(packed, outputs, inputs, bias, find_layout(packed, weight, torch.get_num_threads()))

    def _hold(self, packed: Tensor, outputs: int, inputs: int, bias: Tensor | None, layout: Layout | None) -> None:
        self._packed, self._shape, self._bias, self._layout = packed, (outputs, inputs), bias, layout
        self._address = packed.data_ptr()

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps ``[T, in]`` to ``[T, out]``."""
        rows, out = rows.contiguous(), rows.new_empty(len(rows), self._shape[0])
        packed_product().run(len(rows), self._fields(rows.data_ptr(), out.data_ptr(), torch.get_num_threads()))
        return out

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return self._shape

    @property
    def reads_strips(self) -> bool:
        """Whether few rows are computed by our own code instead of MKL."""
        return self._layout is not None

    @property
    def part(self) -> int:
        """Number of outputs in a part, for a product that reads strips; implements `StripLinear.part`."""
        assert self._layout is not None
        return self._layout.part

    def without_strips(self) -> "PackedLinear":
        """Returns a product with the same weight that MKL computes for any number of rows."""
        linear = PackedLinear.__new__(PackedLinear)
        linear._hold(self._packed, *self._shape, self._bias, None)
        return linear

    def scratch_bytes(self, rows: int) -> int:
        """Returns 0: no scratch memory is needed; implements `TapedLinear.scratch_bytes`."""
        return 0

    def record(self, tape: Tape, rows: int, out: int, counter: int, scratch: int, most_rows: int) -> None:
        """Records the product on a tape; implements `TapedLinear.record`."""
        tape.add(packed_product(), self._fields(rows, out, tape.threads), counter, ALONE)

    def record_strips(self, tape: Tape, rows: int, out: int, counter: int, marks: int) -> None:
        """Records the product of marked strips on a tape; implements `StripLinear.record_strips`."""
        tape.add(strips_product(), [*self._fields(rows, out, tape.threads)[:-1], marks], counter, 0)

    def _fields(self, rows: int, out: int, threads: int) -> list[int]:
        """Makes the fields of a job; see `maitred.engine.kernels.linear.strips.FIELDS`."""
        (outputs, inputs), (compute, together) = self._shape, _functions()
        bias = 0 if self._bias is None else self._bias.data_ptr()
        fields = [compute, inputs, outputs, rows, self._address, bias, out]
        if self._layout is None:
            return fields + [0] * (len(FIELDS) - len(fields))
        threads = min(threads, max(1, outputs * inputs // WEIGHTS_WORTH_A_THREAD)) if together else 1
        share = strips_at_a_time(outputs // STRIP, threads)
        start, block, part = self._layout
        entry = strips_product().address
        return [*fields, self._address + 4 * start, block, part, entry, together, threads, share, 1, 0]

    def tensors(self) -> dict[str, Tensor]:
        """Returns the packed memory, the shape, the layout and the bias; implements `Linear.tensors`.

        MKL leaves up to half of the packed memory untouched: pages of zeros that take no disk.
        """
        tensors = {"packed": self._packed, "shape": torch.tensor(self._shape)}
        if self._layout is not None:
            tensors["layout"] = torch.tensor(self._layout)
        return tensors if self._bias is None else tensors | {"bias": self._bias}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Makes the product from its tensors; implements `Linear.of`."""
        packed = tensors["packed"]
        if packed.data_ptr() % cls.alignment:
            packed = _place(len(packed)).copy_(packed)
        outputs, inputs = tensors["shape"].tolist()
        linear = cls.__new__(cls)
        layout = Layout(*tensors["layout"].tolist()) if "layout" in tensors else None
        linear._hold(packed, outputs, inputs, tensors.get("bias"), layout)
        return linear


@cache
def _functions() -> tuple[int, int]:
    """Returns the addresses of MKL's product and of OpenMP's function that starts threads, or 0."""
    compute, together = _mkl().cblas_sgemm_compute, enter_together()
    address = ctypes.cast(compute, ctypes.c_void_p).value or 0
    return address, 0 if together is None else ctypes.cast(together, ctypes.c_void_p).value or 0


@cache
def packed_product() -> CompiledEntry:
    """Compiles the product: by MKL, or, for few rows, by our own threads strip by strip. See `FIELDS`."""
    most, edition = MOST_ROWS, EDITION

    def compute(address: Any) -> None:
        job = carray(address, ALL)
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        count, inputs, outputs, bias_at = job[COUNT], job[INPUTS], job[OUTPUTS], job[BIAS]
        if job[ENTRY] and count <= most:
            job[NEXT] = 0
            if job[THREADS] > 1:
                enter(job[TOGETHER], job[ENTRY], job.ctypes.data, job[THREADS])
            else:
                call(job[ENTRY], job.ctypes.data)
            return
        if bias_at:
            bias, out = carray(floats(bias_at), outputs), carray(floats(job[OUT]), (count, outputs))
            for row in range(count):
                out[row] = bias
        _compute(
            job[COMPUTE], count, outputs, inputs, job[ROWS], job[PACKED],
            np.float32(1.0 if bias_at else 0.0), job[OUT],
        )  # fmt: skip

    return CompiledEntry(compute)


@intrinsic  # type: ignore[untyped-decorator]
def _compute(
    typing_context: Any,
    function: Any,
    count: Any,
    outputs: Any,
    inputs: Any,
    rows: Any,
    packed: Any,
    beta: Any,
    out: Any,
) -> Any:
    """Emits a call of ``cblas_sgemm_compute`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, long, real = ir.IntType(32), ir.IntType(64), ir.FloatType()
        kind = ir.FunctionType(ir.VoidType(), [*[number] * 6, long, number, long, number, real, long, number])
        function, *sizes, rows, packed, beta, out = arguments
        count, outputs, inputs = (builder.trunc(size, number) for size in sizes)
        form = (number(code) for code in (_ROW_MAJOR, _AS_IS, _PACKED))
        builder.call(
            builder.inttoptr(function, kind.as_pointer()),
            [*form, count, outputs, inputs, rows, inputs, packed, inputs, beta, out, outputs],
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.float32, types.int64), generate


def _layout_rows(outputs: int) -> int:
    """Returns the row count to pack a weight for: many, but fewer than there are outputs.

    MKL divides the longer side of a product among its threads, and decides when it packs which side that is. With as
    many rows as outputs it divides the rows, and then one thread computes all the few rows of a decode. A layout for
    fewer than a
    hundred rows or so would compute a row by itself in another order than among others.
    """
    return _LAYOUT_ROWS if outputs < _WORTH_SHARING_OUTPUTS else min(_LAYOUT_ROWS, outputs // 2)


def can_pack() -> bool:
    """Returns whether this torch contains MKL and lets other code call it."""
    return _mkl() is not None


def agrees(packed: Linear, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether a product gives the same result as torch's own.

    MKL guarantees a packed weight only for the row count that it was packed for. One layout serves all counts in
    practice, but this is undocumented, so each weight is tried before it is used.
    """
    generator = torch.Generator().manual_seed(0)
    plain = PlainLinear(weight, bias)
    for count in (1, 3, 33):
        rows = torch.randn(count, weight.shape[1], generator=generator)
        if not torch.allclose(packed(rows), plain(rows), atol=1e-3, rtol=1e-3):
            return False
    return True


def keeps_rows_apart(packed: PackedLinear, outputs: int, inputs: int) -> bool:
    """Returns whether a row's result is the same to the last bit whatever rows are computed beside it.

    The trial includes row counts that different code computes. MKL guarantees no such independence. With AVX-512 it
    holds; with AVX2, rows differed in products with many inputs, and with older instruction sets in nearly all
    (``docs/design/0021-step-trials-at-start.md``). It depends on the shape and not on the numbers, so each shape is
    tried once.
    """
    shape = outputs, inputs, torch.get_num_threads(), packed.reads_strips
    if shape not in _APART:
        rows = torch.randn(_TRIED_ROWS[-1], inputs, generator=torch.Generator().manual_seed(0))
        together = packed(rows)
        _APART[shape] = all(torch.equal(packed(rows[:count]), together[:count]) for count in _TRIED_ROWS)
    return _APART[shape]


@cache
def _mkl() -> Any:
    """Returns torch's library with MKL's functions declared; None: MKL is not available."""
    library = torch_library()
    try:
        size, pack, compute = (getattr(library, f"cblas_sgemm_{name}") for name in ("pack_get_size", "pack", "compute"))
    except AttributeError:
        return None
    number, real, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    size.argtypes, size.restype = [number] * 4, ctypes.c_size_t
    pack.argtypes, pack.restype = [*[number] * 6, real, address, number, address], None
    compute.argtypes, compute.restype = [*[number] * 6, address, number, address, number, real, address, number], None
    return library


def _place(words: int) -> Tensor:
    """Allocates fp32 zeros at an address aligned for packed weights; pages that stay zero take no memory."""
    step = _PLACE_BYTES // 4
    scratch = torch.from_numpy(np.zeros(words + step, np.float32))
    first = -(scratch.data_ptr() // 4) % step
    return scratch[first : first + words]
