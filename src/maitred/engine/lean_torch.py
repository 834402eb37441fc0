"""Preparation of torch: its import without parts that a CPU engine never uses, and how its threads wait.

The lean import takes little more than half of the time.

Torch has kernels in Python for tensors on the "meta" device, which have a shape but no data. Each import of torch
declares some hundreds of them. Only compiling and exporting models need these kernels; computing on a CPU works without
them. A CPU engine also works without the exporter, layers for quantised training, masked tensors and distributions,
which are Python code on top of torch. So an engine replaces these modules by empty ones while it imports torch. It
calls `complete_torch` where they are needed: on a GPU, and where a checkpoint is converted. Torch's random generators
are imported with the kernels for "meta" tensors.

A matrix product on several threads is as slow as the slowest of them. When another process takes one of the cores for a
moment, all other threads wait at the barrier. If they spin there, which is OpenMP's default, they also take the CPU
time that the last thread needs. On two cores that other work also used, two spinning threads were three to six times
*slower* than one. If they sleep at once, every product of a step begins with waking a thread. This takes a tenth to a
quarter of a step of a small model on an idle machine (`benchmarks/LOG.md`). So `maitred.engine.device.step_threads`
leaves one core for other processes. Waiting threads spin for about the time between two products, and then sleep. This
costs little on an idle machine and avoids the slowdown on a busy one.

NumPy's products are small here: the cosines of some thousand questions. OpenBLAS would spread each over all cores, with
threads that spin, though one thread needs a tenth of a millisecond.
"""

import importlib
import os
import sys
from types import ModuleType

_LEFT_OUT = (
    "torch._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
)
_SPINS = 20_000
"""Number of spins: about a millisecond on a processor whose ``pause`` takes 140 cycles."""


def wait_briefly_at_barriers() -> None:
    """Lets waiting OpenMP threads spin briefly and then sleep, and NumPy compute on one thread.

    What the operator has set stays. Call before torch and NumPy are imported. Only GNU's OpenMP uses the number of
    spins; other implementations use only the policy.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def import_lean_torch() -> None:
    """Imports torch without these modules, unless torch is already imported."""
    if "torch" in sys.modules:
        return
    stand_ins = {name: ModuleType(name) for name in _LEFT_OUT}
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("torch")
    finally:
        for name in stand_ins:
            del sys.modules[name]
    for name, stand_in in stand_ins.items():
        package, _, attribute = name.rpartition(".")
        if getattr(sys.modules[package], attribute, None) is stand_in:
            delattr(sys.modules[package], attribute)


def complete_torch() -> None:
    """Imports the modules of torch that are still missing."""
    for name in _LEFT_OUT:
        importlib.import_module(name)
