"""Numba's compiler behind typed functions, and the vector registers of the processor that it compiles for.

Functions have exact arithmetic for sampling, and relaxed arithmetic for the model.

Numba caches the machine code (beside the source, or under ``NUMBA_CACHE_DIR``, or in the user's cache folder), so only
the first engine on a machine waits for the compiler. Numba detects a stale entry by the modification time of the file
that contains the function. It ignores the files from which that file imports. So after a change to a function that
others inline, touch the files that import it too. If a developer forgets this, the tests that compare the kernels with
plain references fail.

Cached machine code is loaded without Numba's type system. Its about seventy modules are imported only when something
has to be compiled.

By the vector registers, kernels choose the size of their tiles. If the sums of a tile do not fit into the registers,
they are kept in memory: the result is the same, several times slower.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
from numba import types
from numba.core import ccallback, config, dispatcher
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys


@contextmanager
def _absent(module: str) -> Iterator[None]:
    """Makes imports of a module fail inside the context, unless the module is already imported."""
    known = module in sys.modules
    if not known:
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not known:
            del sys.modules[module]


# Numba imports SciPy to find out whether it can use it for matrix products. The import takes a third of a second of
# every start, and no kernel here uses these products.
with _absent("scipy.linalg"):
    import numba.np.arraymath


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Kernel cache of Numba that looks a kernel up without preparing the compiler.

    The preparation takes a seventh of an engine's start, and a cached kernel does not need it. A compilation prepares
    the compiler anyway.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:  # noqa: ANN401 - Numba has no types
        """Returns the cached kernel of a signature, or None."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


setattr(ccallback, "FunctionCache", _KernelCache)  # noqa: B010 - Numba leaves no other way in
setattr(dispatcher, "FunctionCache", _KernelCache)  # noqa: B010

F = TypeVar("F", bound=Callable[..., object])

FAST = frozenset({"nsz", "arcp", "contract", "afn", "reassoc"})
"""Flags of "fast" , without the assumption that numbers are finite: it would hide earlier faults."""


def compiled(function: F) -> F:
    """Compiles a function to machine code that keeps its order of operations and releases the GIL."""
    return _compile(function)


def compiled_entry(function: Callable[[Any], None], *, fast: bool = False) -> Any:  # noqa: ANN401 - Numba has no types
    """Compiles a function of one address to a C function, ``void (int64_t *)``.

    Args:
        function: Function to compile; the caller uses the result's ``address`` and keeps the result alive.
        fast: Whether the compiler may reorder sums to vectorise them, which may change the last bits of results.
    """
    signature = types.void(types.CPointer(types.int64))
    options: dict[str, Any] = {"fastmath": set(FAST), "error_model": "numpy"} if fast else {}
    try:
        return numba.cfunc(signature, cache=True, **options)(function)
    except RuntimeError:  # see `_compile`
        return numba.cfunc(signature, **options)(function)


def _compile(function: F, **options: Any) -> F:  # noqa: ANN401 - Numba's own options
    try:
        return cast(F, numba.njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        return cast(F, numba.njit(nogil=True, **options)(function))


def processor_features() -> frozenset[str]:
    """Returns the instruction sets that compiled code may use, in LLVM's names.

    ``NUMBA_CPU_FEATURES`` has precedence over the host's own.
    """
    named = config.CPU_FEATURES
    if named is not None:
        return frozenset(word[1:] for word in named.split(",") if word.startswith("+"))
    return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)


_WIDE = "avx512f" in processor_features()

VECTOR_LANES = 16 if _WIDE else 8
"""Fp32 numbers of a vector register."""
REGISTERS = 32 if _WIDE else 16
"""Vector registers. Processors without AVX-512 and AVX2 hold as much in other forms, or are slower with any tile."""
