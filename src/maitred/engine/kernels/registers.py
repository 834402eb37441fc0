"""How many numbers a processor holds beside its arithmetic units, by which kernels choose their tiles.

A tile whose sums outgrow the registers is added to memory instead: it computes the same, several times slower.
"""

import llvmlite.binding
from numba.core import config


def processor_features() -> frozenset[str]:
    """What machine code may use here, in LLVM's words; as ``NUMBA_CPU_FEATURES`` says, if it is set."""
    named = config.CPU_FEATURES
    if named is not None:
        return frozenset(word[1:] for word in named.split(",") if word.startswith("+"))
    return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)


_WIDE = "avx512f" in processor_features()

VECTOR_LANES = 16 if _WIDE else 8
"""Fp32 numbers of a vector register."""
REGISTERS = 32 if _WIDE else 16
"""Vector registers. What has neither AVX-512 nor AVX2 holds as much in other pieces, or is slower with any tile."""
