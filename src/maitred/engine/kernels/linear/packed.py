"""fp32 products on a CPU with a weight in MKL's own layout.

Torch's own product repacks an fp32 weight in every call, which costs more than the product itself for the few rows of
a decode step. MKL can keep the packed form instead (``cblas_sgemm_pack`` and ``cblas_sgemm_compute``, in the manual
under "BLAS-like Extensions"). Packed once for many rows, it serves any number of them: up to twice as fast, and a row's
result is the same to the last bit whatever rows are computed beside it. Few rows are multiplied faster still, with the
same bits, by code of our own that reads that form (`strips`). Figures: ``docs/design/0002-cpu-kernels.md``.

Torch wraps these two functions, but hides the packed weight in a tensor without storage. So they are called as what
they are, C functions in the library that torch has loaded: the packed weight is then plain memory, which can be written
to a file and mapped.
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

from maitred.engine.kernels.job import COUNT, NEXT, CompiledEntry, enter_together, floats
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
from maitred.engine.kernels.torch_library import torch_library

_LAYOUT_ROWS = 512
"""MKL chooses the layout by a row count. Layouts for few rows are slow with many; the reverse costs nothing."""
_WORTH_SHARING_OUTPUTS = 256
_ROW_MAJOR, _AS_IS, _TRANSPOSED, _PACKED, _SECOND_MATRIX = 101, 111, 112, 151, 162
"""MKL's own numbers (``mkl_cblas.h``)."""
_TRIED_ROWS = (1, 2, 3, 4, 5, 8, 31, 33, MOST_ROWS, 70)
_APART: dict[tuple[int, int, int, bool], bool] = {}
"""Outputs, inputs, threads, and whether strips are read -> whether rows are computed independently of each other."""
_PLACE_BYTES = 1 << 21
"""Where in its memory MKL puts the weight depends on the address: the same again only at multiples of this."""


class PackedLinear:
    """MKL's product with a weight in MKL's own layout; it keeps no other copy of the weight.

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
        """``[T, in]`` -> ``[T, out]``."""
        rows, out = rows.contiguous(), rows.new_empty(len(rows), self._shape[0])
        packed_product().run(len(rows), self._fields(rows.data_ptr(), out.data_ptr(), torch.get_num_threads()))
        return out

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._shape

    @property
    def reads_strips(self) -> bool:
        """Whether few rows are not MKL's to compute."""
        return self._layout is not None

    @property
    def part(self) -> int:
        """See `maitred.engine.kernels.linear.form.StripLinear`, which it is if it reads strips."""
        assert self._layout is not None
        return self._layout.part

    def without_strips(self) -> "PackedLinear":
        """The same, but all of it computed by MKL."""
        linear = PackedLinear.__new__(PackedLinear)
        linear._hold(self._packed, *self._shape, self._bias, None)
        return linear

    def scratch_bytes(self, rows: int) -> int:
        """See `maitred.engine.kernels.linear.form.TapedLinear`."""
        return 0

    def record(self, tape: Tape, rows: int, out: int, counter: int, room: int, most_rows: int) -> None:
        """See `maitred.engine.kernels.linear.form.TapedLinear`."""
        tape.add(packed_product(), self._fields(rows, out, tape.threads), counter, ALONE)

    def record_strips(self, tape: Tape, rows: int, out: int, counter: int, marks: int) -> None:
        """See `maitred.engine.kernels.linear.form.StripLinear`."""
        tape.add(strips_product(), [*self._fields(rows, out, tape.threads)[:-1], marks], counter, 0)

    def _fields(self, rows: int, out: int, threads: int) -> list[int]:
        """Of a job; see `maitred.engine.kernels.linear.strips.FIELDS`."""
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
        """See `Linear`. Of the packed memory, MKL leaves up to half untouched: pages of zeros that need no place."""
        tensors = {"packed": self._packed, "shape": torch.tensor(self._shape)}
        if self._layout is not None:
            tensors["layout"] = torch.tensor(self._layout)
        return tensors if self._bias is None else tensors | {"bias": self._bias}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """See `Linear`."""
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
    """Where MKL's function is, and the one that enters several threads, or 0."""
    compute, together = _mkl().cblas_sgemm_compute, enter_together()
    address = ctypes.cast(compute, ctypes.c_void_p).value or 0
    return address, 0 if together is None else ctypes.cast(together, ctypes.c_void_p).value or 0


@cache
def packed_product() -> CompiledEntry:
    """The product from compiled code: by MKL, or, of few rows, by our own threads strip by strip. See `FIELDS`."""
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
    """Calls ``cblas_sgemm_compute`` at an address."""

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
    """The row count to pack for: many, but fewer than there are outputs.

    MKL shares out the longer side of a product among its threads, and decides which that is when it packs. With as many
    rows as outputs it is the rows, and the few rows of a decode then all fall to one thread. A layout for fewer than a
    hundred rows or so would compute a row by itself in another order than among others.
    """
    return _LAYOUT_ROWS if outputs < _WORTH_SHARING_OUTPUTS else min(_LAYOUT_ROWS, outputs // 2)


def can_pack() -> bool:
    """Whether this torch brings MKL along, and lets others call it."""
    return _mkl() is not None


def agrees(packed: Linear, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether it gives the same result as torch's own product.

    MKL promises a packed weight only for the row count that it was packed for. That one layout serves all counts is
    what it does, not what it says, so each weight is tried before it is relied on.
    """
    generator = torch.Generator().manual_seed(0)
    plain = PlainLinear(weight, bias)
    for count in (1, 3, 33):
        rows = torch.randn(count, weight.shape[1], generator=generator)
        if not torch.allclose(packed(rows), plain(rows), atol=1e-3, rtol=1e-3):
            return False
    return True


def keeps_rows_apart(packed: PackedLinear, outputs: int, inputs: int) -> bool:
    """Whether a row's result is the same, to the last bit, whatever rows are computed beside it.

    That few rows and many are computed by different code makes no difference, then, or the weight is not used so. MKL
    promises nothing of the kind. With AVX-512 it is so; with AVX2, rows were seen to differ in products with many
    inputs, and with less in nearly all (``docs/design/0021-step-trials-at-start.md``). It goes by the shape and not by
    the numbers, so each shape is tried once.
    """
    shape = outputs, inputs, torch.get_num_threads(), packed.reads_strips
    if shape not in _APART:
        rows = torch.randn(_TRIED_ROWS[-1], inputs, generator=torch.Generator().manual_seed(0))
        together = packed(rows)
        _APART[shape] = all(torch.equal(packed(rows[:count]), together[:count]) for count in _TRIED_ROWS)
    return _APART[shape]


@cache
def _mkl() -> Any:
    """MKL with its functions declared; None if it cannot be had."""
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
    """fp32 zeros at an address that MKL will find its weight at again; pages that stay zero take no memory."""
    step = _PLACE_BYTES // 4
    room = torch.from_numpy(np.zeros(words + step, np.float32))
    first = -(room.data_ptr() // 4) % step
    return room[first : first + words]
