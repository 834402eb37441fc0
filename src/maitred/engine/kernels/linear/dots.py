"""How a processor multiplies bytes four at a time and adds the products up.

All ways give the same numbers to the last bit, so engines on different processors continue each other's answers. What
the processor has decides, and not a clock: one instruction in place of several is faster at any hour, and at an hour
when others take the cores a clock may say otherwise.
"""

import llvmlite.binding
from numba.core import config

PLAIN, PAIRS, VNNI = range(3)
"""With what every processor has; by pairs of numbers of 16 bits (AVX2); in one instruction (AVX-512 VNNI)."""


def best_dot(features: frozenset[str]) -> int:
    """The fastest way that a processor has.

    Args:
        features: See `processor_features`.
    """
    return VNNI if "avx512vnni" in features else PAIRS if "avx2" in features else PLAIN


def processor_features() -> frozenset[str]:
    """What machine code may use here, in LLVM's words; as ``NUMBA_CPU_FEATURES`` says, if it is set."""
    named = config.CPU_FEATURES
    if named is not None:
        return frozenset(word[1:] for word in named.split(",") if word.startswith("+"))
    return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)
