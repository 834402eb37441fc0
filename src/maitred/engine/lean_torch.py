"""Import of torch without parts that a CPU engine never uses, which saves nearly half of its time.

Torch has kernels in Python for tensors on the "meta" device, which have a shape but no data. Each import of torch
declares some hundreds of them. Only compiling and exporting models need these kernels; computing on a CPU works without
them. A CPU engine also works without the exporter, layers for quantised training, masked tensors and distributions,
which are Python code on top of torch. So an engine replaces these modules by empty ones while it imports torch. It
calls `complete_torch` where they are needed: on a GPU, and where a checkpoint is converted. Torch's random generators
are imported with the kernels for "meta" tensors.
"""

import importlib
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
