"""Numba's compiler behind one typed decorator.

Machine code is kept in Numba's cache, so only the first engine on a machine waits for the compiler. Numba tells a
stale entry by the age of the file that holds the function, and not of the files that it imports from: after a change to
`fixed_point` or `row_kernels`, touch the files that import them too. The tests that compare the kernels with plain
references fail if one forgets.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """The function as machine code that runs without the interpreter's lock."""
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return cast(F, numba.njit(nogil=True)(function))
