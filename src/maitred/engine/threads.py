"""Number of threads that compute a step, and their waiting policy at barriers.

A matrix product on several threads is as slow as the slowest of them. When another process takes one of the cores for a
moment, all other threads wait at the barrier. If they spin there, which is OpenMP's default, they also take the CPU
time that the last thread needs. On two cores that other work also used, two spinning threads were three to six times
*slower* than one. If they sleep at once, every product of a step begins with waking a thread. This takes a tenth to a
quarter of a step of a small model on an idle machine (`benchmarks/LOG.md`). So one core is left for other processes.
Waiting threads spin for about the time between two products, and then sleep. This costs little on an idle machine and
avoids the slowdown on a busy one.
"""

import os

_SPINS = 20_000
"""Number of spins: about a millisecond on a processor whose ``pause`` takes 140 cycles."""


def wait_briefly_at_barriers() -> None:
    """Lets waiting OpenMP threads spin briefly and then sleep, unless the operator set a policy.

    Call before torch is imported. Only GNU's OpenMP uses the number of spins; other implementations use only the
    policy.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def step_threads(configured: int, share: float = 1.0) -> int:
    """Returns the configured threads; for 0 a share of the usable cores minus one, at least one.

    Args:
        configured: Number that the operator configured; 0: automatic.
        share: Share of the machine that this engine may use.
    """
    cores = len(os.sched_getaffinity(0)) - 1
    # 1e-9 compensates rounding: three shares of a third use three cores
    return configured or max(1, int(cores * share + 1e-9))
