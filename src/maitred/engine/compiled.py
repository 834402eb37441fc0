"""Numba's compiler behind typed functions: exact arithmetic for sampling, relaxed arithmetic for the model.

Machine code is kept in Numba's cache (beside the source, or under ``NUMBA_CACHE_DIR``, or in the user's cache folder),
so only the first engine on a machine waits for the compiler. Numba tells a stale entry by the age of the file that
holds the function, and not of the files that it imports from: after a change to a function that others inline, touch
the files that import it too. The tests that compare the kernels with plain references fail if one forgets.

Machine code from the cache is taken as it is: all that Numba knows about types, some seventy modules, comes only when
something has to be compiled.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numba
from numba import types
from numba.core import ccallback, dispatcher
from numba.core.caching import FunctionCache
from numba.core.runtime import rtsys


@contextmanager
def _absent(module: str) -> Iterator[None]:
    """Lets imports of a module fail meanwhile, unless it is there already."""
    known = module in sys.modules
    if not known:
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not known:
            del sys.modules[module]


# Numba looks whether SciPy is there for its products of matrices, and to look is to load it: a third of a second of
# every start, for something that no kernel here uses.
with _absent("scipy.linalg"):
    import numba.np.arraymath


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's, but for one thing: it prepares its compiler for every look, also where there is nothing to compile.

    That is a seventh of an engine's start. Whoever compiles prepares it again.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:  # noqa: ANN401 - Numba has no types
        """Returns the kernel that is cached for a signature, or None."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


setattr(ccallback, "FunctionCache", _KernelCache)  # noqa: B010 - Numba leaves no other way in
setattr(dispatcher, "FunctionCache", _KernelCache)  # noqa: B010

F = TypeVar("F", bound=Callable[..., object])

FAST = frozenset({"nsz", "arcp", "contract", "afn", "reassoc"})
"""All of "fast" but the promises that no number is infinite or undefined: those would hide faults upstream."""


def compiled(function: F) -> F:
    """The function as machine code that runs without the interpreter's lock, operation by operation as written."""
    return _compile(function)


def compiled_entry(function: Callable[[Any], None], *, fast: bool = False) -> Any:  # noqa: ANN401 - Numba has no types
    """A function of one address as a C function, ``void (int64_t *)``: its ``address``, for whoever keeps the object.

    Args:
        function: What is compiled.
        fast: It is free to reorder sums so that they vectorise: results may differ in the last bits.
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
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return cast(F, numba.njit(nogil=True, **options)(function))
