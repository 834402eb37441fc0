"""Vector registers of the processor, by which kernels choose the size of their tiles.

If the sums of a tile do not fit into the registers, they are kept in memory: the result is the same, several times
slower.
"""

import llvmlite.binding
from numba.core import config


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
