"""How many threads compute a step, and how they wait for each other.

A matrix product on several threads is as slow as the slowest of them. When another process takes one of the cores for
a moment, all others stand at the barrier; if they spin there, as OpenMP's default has it, they also take the time that
would let the last one arrive. On two cores that other work wanted too, two spinning threads answered three to six times
*slower* than one. If they sleep at once, on the other hand, every product of a step begins with waking a thread: a
tenth to a quarter of a step of a small model on a quiet machine (`benchmarks/LOG.md`). So one core is left to everybody
else, and waiting threads spin for about as long as it takes to get from one product to the next, and then sleep: little
is lost on a quiet machine, and nothing breaks down on a busy one.
"""

import os

_SPINS = 20_000
"""About a millisecond on a processor whose ``pause`` takes 140 cycles."""


def wait_briefly_at_barriers() -> None:
    """Lets waiting OpenMP threads spin shortly, then sleep, unless the operator chose otherwise.

    Call before torch is imported. The number of spins is for GNU's OpenMP; others take the policy alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def step_threads(configured: int, share: float = 1.0) -> int:
    """The threads of a step: what is configured; for 0, a share of the cores that we may use less one; at least one.

    Args:
        configured: By the operator.
        share: Which part of the machine the engine has; others have the rest.
    """
    cores = len(os.sched_getaffinity(0)) - 1
    return configured or max(1, int(cores * share + 1e-9))  # three thirds of three are three
